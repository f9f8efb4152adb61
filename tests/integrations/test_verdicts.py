"""What a retriever has announced has verdicts in the answer's report, whichever framework asks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from langchain_fused_kv import ChatFusedKV
from langchain_fused_kv import FusedKVLLM as LangChainLLM
from llama_index_fused_kv import FusedKVLLM as LlamaIndexLLM

RETRIEVED = [SHORT[0], SHORT[1], SHORT[9]]
SHOWN = [SHORT[0], SHORT[1].replace(" ", "\n", 2), SHORT[9]]
OUTCOMES = ["reused", "respaced", "not_ingested"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    options: dict[str, Any] = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    folder = tmp_path_factory.mktemp("verdicts")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as made:
        made.build_kv_cache(SHORT[:4], progress=False)
        yield made


def outcomes(verdicts: list[dict[str, Any]]) -> list[str]:
    return [verdict["outcome"] for verdict in verdicts]


def test_langchain(engine: FusedKVEngine) -> None:
    llm, chat = LangChainLLM.from_engine(engine, max_tokens=2), ChatFusedKV.from_engine(engine, max_tokens=2)
    llm.announce_retrieval(RETRIEVED)
    result = llm.generate([rag_prompt(SHOWN)])
    assert outcomes(result.generations[0][0].generation_info["fused_kv"]["verdicts"]) == OUTCOMES
    chat.announce_retrieval(RETRIEVED)
    assert outcomes(chat.invoke(rag_prompt(SHOWN)).response_metadata["fused_kv"]["verdicts"]) == OUTCOMES
    chat.announce_retrieval(RETRIEVED)
    answer = asyncio.run(chat.ainvoke(rag_prompt(SHOWN)))
    assert outcomes(answer.response_metadata["fused_kv"]["verdicts"]) == OUTCOMES


def test_llama_index(engine: FusedKVEngine) -> None:
    llm = LlamaIndexLLM.from_engine(engine, max_tokens=2)
    llm.announce_retrieval(RETRIEVED)
    assert outcomes(llm.complete(rag_prompt(SHOWN)).raw["fused_kv"]["verdicts"]) == OUTCOMES


def test_each_prompt_of_a_batch_has_its_own_verdicts(engine: FusedKVEngine) -> None:
    llm = LangChainLLM.from_engine(engine, max_tokens=2)
    retrievals = [[SHORT[0], SHORT[9]], [SHORT[1], SHORT[10]], [SHORT[2], SHORT[11]]]
    for texts in retrievals:
        llm.announce_retrieval(texts)
    result = llm.generate([rag_prompt(texts) for texts in retrievals])
    for texts, (generation,) in zip(retrievals, result.generations, strict=True):
        verdicts = generation.generation_info["fused_kv"]["verdicts"]
        assert [verdict["text"] for verdict in verdicts] == [text[:80] for text in texts]
        assert outcomes(verdicts) == ["reused", "not_ingested"]


def test_a_document_is_checked(engine: FusedKVEngine) -> None:
    llm = LangChainLLM.from_engine(engine)
    assert llm.explain_chunk(SHORT[0]).is_reused
    assert not llm.explain_chunk(SHORT[9]).is_reused
