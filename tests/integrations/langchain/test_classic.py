"""The chains and retrievers of langchain-classic: what they retrieve is reused; what they rewrite is warned about."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.qa_with_sources.retrieval import RetrievalQAWithSourcesChain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import EmbeddingsFilter, LLMChainExtractor
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from reuse import RETRIEVED, Requests

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import FusedKVWarning
from langchain_fused_kv import FusedKVLLM, FusedKVRetriever

QUESTIONS = ["How many passengers can the Aldebaran carry?", "In which year was Larkspur Ferries founded?"]

pytestmark = [
    pytest.mark.usefixtures("passed_verbatim"),
    pytest.mark.filterwarnings("ignore::langchain_core._api.deprecation.LangChainDeprecationWarning"),
]


def join(documents: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in documents)


@pytest.fixture
def llm(engine: FusedKVEngine) -> FusedKVLLM:
    return FusedKVLLM.from_engine(engine, max_tokens=4, recompute_ratio=0.0)


def check(requests: Requests) -> None:
    """Nothing retrieved is missing, and at least 95% of its tokens were reused."""
    assert requests.retrieved
    assert 0.95 <= requests.share() <= 1.0
    requests.clear()


def ask(retriever: Any, llm: FusedKVLLM, prompt: PromptTemplate) -> None:
    """Ask through the usual chain, with a retriever in front that is not announced to the LLM yet."""
    wrapped = FusedKVRetriever(retriever=retriever, llm=llm)
    chain: Runnable[str, str] = {"context": wrapped | join, "question": RunnablePassthrough()} | prompt | llm
    chain.invoke(QUESTIONS[0])


# -- chains ----------------------------------------------------------------------------------------------------


def test_create_retrieval_chain_with_stuff(retriever: FusedKVRetriever, llm: FusedKVLLM, requests: Requests) -> None:
    template = PromptTemplate.from_template("{context}\n\nQuestion: {input}")
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, template))
    result = chain.invoke({"input": QUESTIONS[0]})
    assert [doc.metadata["fused_kv_chunk_id"] for doc in result["context"]].count(None) == 0
    check(requests)
    asyncio.run(chain.ainvoke({"input": QUESTIONS[0]}))
    check(requests)


def test_history_aware_retrieval(
    retriever: FusedKVRetriever, llm: FusedKVLLM, prompt: PromptTemplate, requests: Requests
) -> None:
    rephrase = ChatPromptTemplate([("placeholder", "{chat_history}"), ("human", "{input}")])
    aware = create_history_aware_retriever(llm, retriever, rephrase)
    template = PromptTemplate.from_template("{context}\n\nQuestion: {input}")
    chain = create_retrieval_chain(aware, create_stuff_documents_chain(llm, template))
    history: list[tuple[str, str]] = []
    for turn, question in enumerate(QUESTIONS):
        result = chain.invoke({"input": question, "chat_history": history})
        history += [("human", question), ("ai", result["answer"])]
        assert [report["chunks_found"] for report in requests.reports] == [0] * turn + [RETRIEVED]
        check(requests)


# map_rerank asks for a score that SmolLM2 does not write.
@pytest.mark.parametrize(("kind", "calls"), [("stuff", 1), ("map_reduce", RETRIEVED + 1), ("refine", RETRIEVED)])
def test_retrieval_qa(retriever: FusedKVRetriever, llm: FusedKVLLM, requests: Requests, kind: str, calls: int) -> None:
    # The default prompt of the last step has 1,500 tokens of examples.
    short = {"combine_prompt": PromptTemplate.from_template("{summaries}\n\nQuestion: {question}")}
    chain = RetrievalQA.from_chain_type(
        llm, chain_type=kind, retriever=retriever, chain_type_kwargs=short if kind == "map_reduce" else {}
    )
    chain.invoke({"query": QUESTIONS[0]})
    assert len(requests.reports) == calls
    check(requests)


def test_retrieval_qa_asynchronously(retriever: FusedKVRetriever, llm: FusedKVLLM, requests: Requests) -> None:
    chain = RetrievalQA.from_chain_type(llm, retriever=retriever)
    asyncio.run(chain.ainvoke({"query": QUESTIONS[0]}))
    check(requests)


def test_retrieval_qa_with_sources(retriever: FusedKVRetriever, llm: FusedKVLLM, requests: Requests) -> None:
    short = {"prompt": PromptTemplate.from_template("{summaries}\n\nQuestion: {question}")}
    chain = RetrievalQAWithSourcesChain.from_chain_type(llm, retriever=retriever, chain_type_kwargs=short)
    chain.invoke({"question": QUESTIONS[0]})
    check(requests)


def test_conversational_retrieval(retriever: FusedKVRetriever, llm: FusedKVLLM, requests: Requests) -> None:
    chain = ConversationalRetrievalChain.from_llm(llm, retriever)
    answer = chain.invoke({"question": QUESTIONS[0], "chat_history": []})["answer"]
    check(requests)
    chain.invoke({"question": QUESTIONS[1], "chat_history": [(QUESTIONS[0], answer)]})
    assert [report["chunks_found"] for report in requests.reports] == [0, RETRIEVED]
    check(requests)


# -- retrievers ------------------------------------------------------------------------------------------------


def test_parent_documents(
    documents: list[Document], vector_store: FAISS, llm: FusedKVLLM, prompt: PromptTemplate, requests: Requests
) -> None:
    parents = ParentDocumentRetriever(
        vectorstore=FAISS.from_texts(["-"], vector_store.embeddings),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=200, chunk_overlap=0),
        search_kwargs={"k": 4},
    )
    parents.add_documents(documents[:6])
    ask(parents, llm, prompt)
    check(requests)


def test_an_ensemble(vector_store: FAISS, llm: FusedKVLLM, prompt: PromptTemplate, requests: Requests) -> None:
    both = [vector_store.as_retriever(search_type=kind, search_kwargs={"k": 2}) for kind in ("similarity", "mmr")]
    ask(EnsembleRetriever(retrievers=both, weights=[0.5, 0.5]), llm, prompt)
    check(requests)


def test_several_queries(vector_store: FAISS, llm: FusedKVLLM, prompt: PromptTemplate, requests: Requests) -> None:
    writer = llm.bind(max_tokens=16)
    ask(MultiQueryRetriever.from_llm(vector_store.as_retriever(search_kwargs={"k": 2}), writer), llm, prompt)
    assert len(requests.reports) == 2
    check(requests)


def test_a_compressor_that_drops_documents(
    vector_store: FAISS, llm: FusedKVLLM, prompt: PromptTemplate, requests: Requests
) -> None:
    compressing = ContextualCompressionRetriever(
        base_compressor=EmbeddingsFilter(embeddings=vector_store.embeddings, k=2),
        base_retriever=vector_store.as_retriever(search_kwargs={"k": 5}),
    )
    ask(compressing, llm, prompt)
    assert len({report["chunks_found"] for report in requests.reports} | {2}) == 1
    check(requests)


def test_a_compressor_that_rewrites_documents_is_warned_about_once(
    engine: FusedKVEngine, vector_store: FAISS, llm: FusedKVLLM, prompt: PromptTemplate, requests: Requests
) -> None:
    extractor = LLMChainExtractor.from_llm(FusedKVLLM.from_engine(engine, max_tokens=8))
    base = FusedKVRetriever(retriever=vector_store.as_retriever(search_kwargs={"k": 2}), llm=llm)
    compressing = ContextualCompressionRetriever(base_compressor=extractor, base_retriever=base)
    chain = {"context": compressing | join, "question": RunnablePassthrough()} | prompt | llm
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FusedKVWarning)
        for question in QUESTIONS:
            chain.invoke(question)
    told = [str(warning.message) for warning in caught if warning.category is FusedKVWarning]
    assert len(told) == 1
    assert "compressor" in told[0]
    assert requests.reports[-1]["reused_tokens"] == 0
    assert len(requests.reports[-1]["unmatched"]) == 2
