"""Query engines and chat engines: in every mode the retrieved nodes' text comes from stored KV."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from llama_index.core import PromptTemplate
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore
from reuse import Requests
from waiting import wait_until_in_memory

from fused_kv_llm.errors import FusedKVWarning
from langchain_fused_kv import ChatFusedKV, FusedKVRetriever
from llama_index_fused_kv import FusedKVIndex, FusedKVLLM, FusedKVPostprocessor

K = 3
QUESTION = "How many passengers can the Aldebaran carry?"


class Reports(Requests):
    """Requests, measured against retrieved nodes."""

    def share_of(self, nodes: list[NodeWithScore]) -> float:
        """Return the tokens reused in all requests over the tokens of the retrieved nodes."""
        return self.share(node.node.get_content() for node in nodes)


@pytest.fixture
def reports(llm: FusedKVLLM, monkeypatch: pytest.MonkeyPatch) -> Reports:
    return Reports(llm, monkeypatch)


@pytest.mark.parametrize(
    ("mode", "calls"),
    [("compact", 1), ("refine", K), ("tree_summarize", 1), ("accumulate", K), ("compact_accumulate", 1)],
)
def test_response_modes(index: FusedKVIndex, llm: FusedKVLLM, reports: Reports, mode: Any, calls: int) -> None:
    engine = index.as_query_engine(llm=llm, similarity_top_k=K, response_mode=mode)
    response = engine.query(QUESTION)
    assert len(response.source_nodes) == K
    assert len(reports.reports) == calls
    assert reports.share_of(response.source_nodes) >= 0.95


def test_streaming_and_asynchronous_queries(index: FusedKVIndex, llm: FusedKVLLM, reports: Reports) -> None:
    streaming = index.as_query_engine(llm=llm, similarity_top_k=K, streaming=True).query(QUESTION)
    text = "".join(streaming.response_gen)
    assert reports.share_of(streaming.source_nodes) >= 0.95
    reports.clear()
    awaited = asyncio.run(index.as_query_engine(llm=llm, similarity_top_k=K).aquery(QUESTION))
    assert str(awaited) == text
    assert reports.share_of(awaited.source_nodes) >= 0.95


@pytest.mark.parametrize("mode", ["context", "condense_plus_context"])
def test_chat_engines(index: FusedKVIndex, llm: FusedKVLLM, reports: Reports, mode: Any) -> None:
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=K)
    for question in (QUESTION, "And how many cars?"):
        reports.clear()
        response = chat.chat(question)
        assert reports.share_of(response.source_nodes) >= 0.95
    reports.clear()
    streamed = chat.stream_chat("How fast is it?")
    assert "".join(streamed.response_gen) == str(streamed)
    assert reports.share_of(streamed.source_nodes) >= 0.95


def test_a_question_condensed_from_the_conversation(index: FusedKVIndex, llm: FusedKVLLM, reports: Reports) -> None:
    chat = index.as_chat_engine(chat_mode="condense_question", llm=llm, similarity_top_k=K)
    for turn, question in enumerate((QUESTION, "And how many cars?")):
        reports.clear()
        response = asyncio.run(chat.achat(question))
        assert [report["chunks_found"] for report in reports.reports] == [0] * turn + [K]
        assert reports.share_of(response.source_nodes) >= 0.95


def test_both_frameworks_at_once_on_one_engine(
    index: FusedKVIndex, llm: FusedKVLLM, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ChatFusedKV.from_engine(llm.engine, max_tokens=4, recompute_ratio=0.0)
    requests = Requests(other, monkeypatch)
    assert other.engine.loaded.model is llm.engine.loaded.model
    nodes = index.as_retriever(similarity_top_k=K).retrieve(QUESTION)
    passages = [node.node.get_content().strip() for node in nodes]
    chain = FusedKVRetriever(retriever=RunnableLambda(lambda _: list(map(Document, passages))), llm=other) | (
        lambda found: "\n\n".join([*(document.page_content for document in found), QUESTION])
    )
    query = index.as_query_engine(llm=llm, similarity_top_k=K)
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit((chain | other).invoke, QUESTION), threads.submit(query.query, QUESTION)]
        assert all(str(answer.result()) for answer in answers)
    assert requests.share() >= 0.95
    assert reports.share_of(nodes) >= 0.95


def test_citation_engine(index: FusedKVIndex, llm: FusedKVLLM, reports: Reports) -> None:
    engine = CitationQueryEngine.from_args(index, llm=llm, similarity_top_k=K, citation_chunk_size=512)
    response = engine.query(QUESTION)
    assert response.source_nodes[0].node.get_content().startswith("Source 1:")
    whole = index.as_retriever(similarity_top_k=K).retrieve(QUESTION)
    assert reports.share_of(whole) >= 0.95


def test_fusion_retriever(index: FusedKVIndex, llm: FusedKVLLM, reports: Reports) -> None:
    fusion = QueryFusionRetriever([index.as_retriever(similarity_top_k=K)], llm=llm, num_queries=2, use_async=False)
    engine = RetrieverQueryEngine.from_args(fusion, llm=llm)
    response = engine.query(QUESTION)
    reports.reports[:] = reports.reports[-1:]
    assert reports.share_of(response.source_nodes) >= 0.95


def test_a_custom_prompt(index: FusedKVIndex, llm: FusedKVLLM, reports: Reports) -> None:
    template = PromptTemplate("Question: {query_str}\nPassages:\n{context_str}\nAnswer:")
    engine = index.as_query_engine(llm=llm, similarity_top_k=K, text_qa_template=template)
    assert reports.share_of(engine.query(QUESTION).source_nodes) >= 0.95


def test_simple_summarize_escapes_the_text_and_is_warned_about(
    index: FusedKVIndex, llm: FusedKVLLM, reports: Reports
) -> None:
    node = index.docstore.get_node("node-0").model_copy(deep=True)
    node.set_content("First the Aldebaran sails.\nThen the Bellatrix follows her.\nThe Mizar comes last of all.")
    llm.build_kv_cache([node], progress=False)
    postprocessor = FusedKVPostprocessor(llm=llm)
    found = postprocessor.postprocess_nodes([NodeWithScore(node=node)], query_str=QUESTION)
    synthesizer = get_response_synthesizer(response_mode="simple_summarize", llm=llm)  # type: ignore[arg-type]
    with pytest.warns(FusedKVWarning, match="line breaks escaped"):
        synthesizer.synthesize(QUESTION, found)
    assert reports.reports[0]["reused_tokens"] == 0


class _Loaded(BaseNodePostprocessor):
    """Passes the nodes on when their KV is in memory."""

    llm: FusedKVLLM

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: Any = None) -> list[NodeWithScore]:
        engine = self.llm.engine
        wait_until_in_memory(engine.store, [engine.chunk_id(node.node.get_content()) for node in nodes])
        return nodes


def test_the_postprocessor_prefetches_and_passes_nodes_unchanged(
    index: FusedKVIndex, llm: FusedKVLLM, reports: Reports
) -> None:
    """At the first request: nothing is in memory before the retrieval, and nothing but the postprocessor loads it."""
    llm.engine.store.drop_memory()
    steps = [FusedKVPostprocessor(llm=llm), _Loaded(llm=llm)]
    response = index.as_query_engine(llm=llm, similarity_top_k=K, node_postprocessors=steps).query(QUESTION)
    assert set(reports.reports[0]["bytes_loaded"]) == {"memory"}
    assert reports.share_of(response.source_nodes) >= 0.95
    assert reports.reports[0]["unmatched"] == []
    plain = index.as_query_engine(llm=llm, similarity_top_k=K).query(QUESTION)
    assert [n.node.hash for n in response.source_nodes] == [n.node.hash for n in plain.source_nodes]


def test_messages_with_the_question_in_front(index: FusedKVIndex, llm: FusedKVLLM, reports: Reports) -> None:
    nodes = index.as_retriever(similarity_top_k=K).retrieve(QUESTION)
    from llama_index.core.base.llms.types import ChatMessage

    context = "\n\n".join(node.node.get_content().strip() for node in nodes)
    llm.chat([ChatMessage(content=f"{QUESTION}\n\n{context}"), ChatMessage(role="system", content="Be brief.")])
    assert reports.share_of(nodes) >= 0.95
