"""What a retriever has announced has verdicts in the answer's report, whichever framework asks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from corpus import SHORT, rag_prompt
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from llama_index.core.schema import NodeWithScore, TextNode
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from langchain_fused_kv import ChatFusedKV, FusedKVRetriever
from langchain_fused_kv import FusedKVLLM as LangChainLLM
from llama_index_fused_kv import FusedKVLLM as LlamaIndexLLM
from llama_index_fused_kv import FusedKVPostprocessor

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


@pytest.mark.parametrize("kind", [LangChainLLM, LlamaIndexLLM])
def test_scores_reach_the_verdicts(engine: FusedKVEngine, kind: Any) -> None:
    llm = kind.from_engine(engine, max_tokens=2)
    llm.announce_retrieval([SHORT[0], SHORT[0], SHORT[9], SHORT[1]], [0.9, 0.1, None, float("nan")])
    llm.generate([rag_prompt(SHOWN)]) if kind is LangChainLLM else llm.complete(rag_prompt(SHOWN))
    told = [(verdict.text, verdict.score) for verdict in llm.last_report.verdicts[:3]]
    assert told == [(SHORT[0][:80], 0.9), (SHORT[9][:80], None), (SHORT[1][:80], None)]


def test_langchain_documents_have_scores_where_rerankers_leave_them(engine: FusedKVEngine) -> None:
    llm = LangChainLLM.from_engine(engine, max_tokens=2)
    found = [
        Document(SHORT[0], metadata={"relevance_score": 0.75}),
        Document(SHORT[1], metadata={"score": "high"}),
        Document(SHORT[2]),
    ]
    FusedKVRetriever(retriever=RunnableLambda(lambda _: found), llm=llm).invoke("ferries")
    llm.generate([rag_prompt(SHORT[:3])])
    assert llm.last_report is not None
    assert [verdict.score for verdict in llm.last_report.verdicts] == [0.75, None, None]


def test_llama_index_nodes_keep_their_scores(engine: FusedKVEngine) -> None:
    llm = LlamaIndexLLM.from_engine(engine, max_tokens=2)
    nodes = [
        NodeWithScore(node=TextNode(text=text), score=score) for text, score in zip(SHORT, (0.9, None), strict=False)
    ]
    nodes.insert(1, NodeWithScore(node=TextNode(text=""), score=0.5))
    FusedKVPostprocessor(llm=llm).postprocess_nodes(nodes)
    verdicts = llm.complete(rag_prompt(SHORT[:2])).raw["fused_kv"]["verdicts"]
    assert [verdict["score"] for verdict in verdicts] == [0.9, None]


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
