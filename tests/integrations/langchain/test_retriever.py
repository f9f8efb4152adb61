"""FusedKVRetriever around real retrievers, and the one warning about texts that never reach the prompt."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from langchain_community.vectorstores import FAISS
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from waiting import wait_until_in_memory

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError, FusedKVWarning
from langchain_fused_kv import FusedKVLLM, FusedKVRetriever

QUESTION = "How many passengers can the Aldebaran carry?"


def join(documents: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in documents)


def make_chain(
    vector_store: FAISS, llm: FusedKVLLM, prompt: Any, inner: Callable[[Any], Any] = join
) -> Runnable[Any, Any]:
    retriever = FusedKVRetriever(retriever=vector_store.as_retriever(search_kwargs={"k": 3}), llm=llm)
    context = retriever | inner if inner else retriever
    return {"context": context, "question": RunnablePassthrough()} | prompt | llm


def test_documents_pass_through_with_the_id_of_their_kv(vector_store: FAISS, llm: FusedKVLLM) -> None:
    inner = vector_store.as_retriever(search_kwargs={"k": 3})
    plain = inner.invoke(QUESTION)
    wrapped = FusedKVRetriever(retriever=inner, llm=llm).invoke(QUESTION)
    assert [(doc.id, doc.page_content) for doc in wrapped] == [(doc.id, doc.page_content) for doc in plain]
    for before, after in zip(plain, wrapped, strict=True):
        assert after.metadata == {
            **before.metadata,
            "fused_kv_chunk_id": llm.engine.chunk_id(before.page_content),
        }
        assert "fused_kv_chunk_id" not in before.metadata


def test_what_has_no_kv_gets_no_id(llm: FusedKVLLM) -> None:
    unknown = [Document("Nobody has ever ingested this sentence about the moons of Jupiter and their orbits.")]
    found = FusedKVRetriever(retriever=RunnableLambda(lambda _: unknown), llm=llm).invoke("moons")
    assert found[0].metadata == {"fused_kv_chunk_id": None}


def test_keyword_arguments_reach_the_inner_retriever(vector_store: FAISS, llm: FusedKVLLM) -> None:
    retriever = FusedKVRetriever(retriever=vector_store.as_retriever(), llm=llm)
    assert len(retriever.invoke(QUESTION, k=2)) == 2
    assert len(asyncio.run(retriever.ainvoke(QUESTION, k=6))) == 6


class _AsyncOnly(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        raise NotImplementedError("only asynchronously")

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(query)]


def test_asynchronous_calls_stay_asynchronous(llm: FusedKVLLM) -> None:
    found = asyncio.run(FusedKVRetriever(retriever=_AsyncOnly(), llm=llm).ainvoke("hello"))
    assert found[0].page_content == "hello"


def test_a_bound_llm_is_accepted(vector_store: FAISS, llm: FusedKVLLM) -> None:
    retriever = FusedKVRetriever(retriever=vector_store.as_retriever(), llm=llm.bind(stop=["\n"]))
    assert retriever.invoke(QUESTION)[0].metadata["fused_kv_chunk_id"]


def test_the_wrong_place_in_the_chain_is_named(vector_store: FAISS, llm: FusedKVLLM) -> None:
    retriever = FusedKVRetriever(retriever=vector_store.as_retriever() | join, llm=llm)
    with pytest.raises(ConfigError, match="'str' instead of a list of Document"):
        retriever.invoke(QUESTION)


def test_prefetched_chunks_come_from_memory(vector_store: FAISS, llm: FusedKVLLM, prompt: Any) -> None:
    """At the first request: nothing is in memory before the retrieval, and nothing but the retriever loads it."""
    store = llm.engine.store
    store.drop_memory()

    def join_when_loaded(documents: list[Document]) -> str:
        wait_until_in_memory(store, [document.metadata["fused_kv_chunk_id"] for document in documents])
        return join(documents)

    make_chain(vector_store, llm, prompt, inner=join_when_loaded).invoke(QUESTION)
    assert llm.last_report is not None
    assert llm.last_report.chunks_found == 3
    assert set(llm.last_report.bytes_loaded) == {"memory"}


def test_a_chain_without_joining_is_warned_about_once(vector_store: FAISS, llm: FusedKVLLM, prompt: Any) -> None:
    quoted = FAISS.from_texts(['The "Tern" system\nkeeps all bookings of the ferries.'], vector_store.embeddings)
    chain = make_chain(quoted, llm, prompt, inner=lambda documents: documents)
    with pytest.warns(FusedKVWarning, match="line breaks escaped.*join") as caught:
        chain.invoke(QUESTION)
    assert len(caught) == 1
    assert llm.last_report is not None
    assert llm.last_report.unmatched == ['The "Tern" system\nkeeps all bookings of the ferries.']
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chain.invoke(QUESTION)
    assert "line breaks escaped" in llm.last_report.warnings[0]


def test_mustache_escaping_is_warned_about(vector_store: FAISS, llm: FusedKVLLM) -> None:
    amp = FAISS.from_texts(["Fares & timetables of the ferries <2026>"], vector_store.embeddings)
    pytest.importorskip("langchain_core.utils.mustache")
    escaped = PromptTemplate.from_template("{{context}}\n{{question}}", template_format="mustache")
    with pytest.warns(FusedKVWarning, match="mustache"):
        make_chain(amp, llm, escaped).invoke(QUESTION)
    verbatim = PromptTemplate.from_template("{{{context}}}\n{{question}}", template_format="mustache")
    make_chain(amp, llm, verbatim).invoke(QUESTION)


def test_a_template_that_truncates_is_warned_about(vector_store: FAISS, llm: FusedKVLLM, prompt: Any) -> None:
    chain = make_chain(vector_store, llm, prompt, inner=lambda docs: "\n".join(d.page_content[:90] for d in docs))
    with pytest.warns(FusedKVWarning, match="only their beginnings"):
        list(chain.stream(QUESTION))


def test_calls_that_never_see_chunks_are_not_warned_about(vector_store: FAISS, llm: FusedKVLLM, prompt: Any) -> None:
    chain = make_chain(vector_store, llm, prompt)
    chain.invoke(QUESTION)
    llm.invoke("Rephrase the question: and how many cars?")
    chain.batch([QUESTION, "How many cars can the Bellatrix carry?", QUESTION])
    assert llm.last_report is not None
    assert llm.last_report.unmatched == []


def test_llms_on_one_engine_keep_their_own_retrievals(engine: FusedKVEngine, vector_store: FAISS) -> None:
    one, other = (FusedKVLLM.from_engine(engine, max_tokens=2) for _ in range(2))
    FusedKVRetriever(retriever=vector_store.as_retriever(), llm=one).invoke(QUESTION)
    other.invoke("Hello")
    with pytest.warns(FusedKVWarning):
        one.invoke("Hello")


def test_documents_are_reordered_only_if_asked_for(llm: FusedKVLLM) -> None:
    found = [Document(f"The ferry number {number} leaves at {number} in the morning.") for number in range(3)]
    llm.engine.clear_prefix_cache()
    llm.engine.order_chunks([found[2].page_content, found[1].page_content])
    plain = FusedKVRetriever(retriever=RunnableLambda(lambda _: found), llm=llm)
    assert [doc.page_content for doc in plain.invoke("ferry")] == [doc.page_content for doc in found]
    ordered = FusedKVRetriever(retriever=RunnableLambda(lambda _: found), llm=llm, reorder_chunks=True)
    for documents in (ordered.invoke("ferry"), asyncio.run(ordered.ainvoke("ferry"))):
        assert [doc.page_content for doc in documents] == [found[at].page_content for at in (2, 1, 0)]
        assert [doc.metadata["fused_kv_rank"] for doc in documents] == [3, 2, 1]
    assert found[0].metadata == {}
    llm.engine.clear_prefix_cache()


def test_reordering_needs_an_engine() -> None:
    class Announced:
        def prefetch(self, texts: Any) -> list[str | None]:
            return [None for _ in texts]

        def announce_retrieval(self, texts: Any, scores: Any = ()) -> None:
            pass

    with pytest.raises(ValueError, match="reorder_chunks=True needs a FusedKVLLM"):
        FusedKVRetriever(retriever=RunnableLambda(lambda _: list[Document]()), llm=Announced(), reorder_chunks=True)
