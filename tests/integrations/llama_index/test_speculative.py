"""LlamaIndex retrievers with stages: query engines answer what the final nodes say, and begin before they are final."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
import pytest
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.serving import RequestState, loop_of
from llama_index_fused_kv import (
    FusedKVIndex,
    FusedKVLLM,
    FusedKVRetriever,
    QuickFirstRetriever,
    StagedFaissRetriever,
    compact_prompt,
)

QUESTION = "How many passengers can the Aldebaran carry?"


class Given(BaseRetriever):
    """Yields given stages; waits until each is computed before the next."""

    def __init__(self, stages: list[list[TextNode]], engine: FusedKVEngine) -> None:
        self._given, self._engine = stages, engine
        super().__init__()

    def stages(self, query_bundle: QueryBundle) -> Iterator[list[NodeWithScore]]:
        for number, nodes in enumerate(self._given):
            yield [NodeWithScore(node=node, score=1.0) for node in nodes]
            until_s = time.monotonic() + 20
            while number < len(self._given) - 1 and time.monotonic() < until_s:
                requests = loop_of(self._engine.model).scheduler.requests()
                if any(one.state is RequestState.HELD for one in requests):
                    break
                time.sleep(0.005)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self._given[-1]]


@pytest.mark.parametrize("right", [True, False])
def test_a_query_engine_takes_up_what_was_proposed(
    engine: FusedKVEngine, llm: FusedKVLLM, nodes: list[TextNode], right: bool
) -> None:
    given = Given([nodes[:2] if right else nodes[4:6], nodes[:2]], engine)
    want = str(RetrieverQueryEngine.from_args(given, llm=llm).query(QUESTION))
    assert llm.last_report is not None
    assert llm.last_report.speculation == ""
    wrapped = FusedKVRetriever(given, llm, compact_prompt(llm))
    answer = RetrieverQueryEngine.from_args(wrapped, llm=llm).query(QUESTION)
    assert str(answer) == want
    report = llm.last_report
    assert (report.speculation, report.speculations_dropped) == (("confirmed", 0) if right else ("corrected", 1))
    assert report.search_hidden_s > 0
    assert loop_of(engine.model)._open == 0


def test_faiss_in_stages_finds_what_the_index_finds(
    llm: FusedKVLLM, nodes: list[TextNode], embed_model: Any, index: FusedKVIndex
) -> None:
    vectors = np.array([embed_model.get_text_embedding(node.text) for node in nodes], np.float32)
    searched = faiss.index_factory(vectors.shape[1], "IVF4,Flat")
    searched.train(vectors)
    searched.add(vectors)
    searched.nprobe = 4
    staged = StagedFaissRetriever(searched, nodes, embed_model, similarity_top_k=3)
    query = np.array([embed_model.get_query_embedding(QUESTION)], np.float32)
    want = [nodes[at].node_id for at in searched.search(query, 3)[1][0]]
    found = [[one.node.node_id for one in stage] for stage in staged.stages(QueryBundle(QUESTION))]
    assert len(found) == 3
    assert found[-1] == want
    assert [one.node.node_id for one in FusedKVRetriever(staged, llm).retrieve(QUESTION)] == want
    with pytest.raises(ConfigError, match="vectors, but 1 nodes"):
        StagedFaissRetriever(searched, nodes[:1], embed_model)


def test_a_quick_retriever_in_front_of_a_slow_one(llm: FusedKVLLM, index: FusedKVIndex) -> None:
    slow = index.as_retriever(similarity_top_k=2)
    both = QuickFirstRetriever(index.as_retriever(similarity_top_k=1), slow)
    wrapped = FusedKVRetriever(both, llm, compact_prompt(llm))
    assert [one.node.node_id for one in wrapped.retrieve(QUESTION)] == [
        one.node.node_id for one in slow.retrieve(QUESTION)
    ]
    with pytest.raises(ConfigError, match="no method stages"):
        FusedKVRetriever(slow, llm)


def test_nodes_are_reordered_only_if_asked_for_and_what_is_proposed_too(
    engine: FusedKVEngine, llm: FusedKVLLM, nodes: list[TextNode]
) -> None:
    given = Given([nodes[:3], nodes[:3]], engine)
    engine.clear_prefix_cache()
    engine.order_chunks([nodes[2].text, nodes[1].text])
    plain = FusedKVRetriever(given, llm).retrieve(QUESTION)
    assert [one.node.node_id for one in plain] == [one.node_id for one in nodes[:3]]
    ordered = FusedKVRetriever(given, llm, compact_prompt(llm), reorder_chunks=True)
    RetrieverQueryEngine.from_args(ordered, llm=llm).query(QUESTION)
    assert llm.last_report is not None
    assert llm.last_report.speculation == "confirmed"
    again = ordered.retrieve(QUESTION)
    assert [one.node.node_id for one in again] == [nodes[at].node_id for at in (2, 1, 0)]
    engine.clear_prefix_cache()
