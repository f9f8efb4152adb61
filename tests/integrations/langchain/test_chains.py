"""Chain shapes that people build: in every one of them the retrieved chunks are found and reused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough

from langchain_fused_kv import FusedKVLLM, FusedKVRetriever

K = 3
QUESTIONS = ["How many passengers can the Aldebaran carry?", "In which year was Larkspur Ferries founded?"]


def join(documents: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in documents)


@pytest.fixture
def retriever(vector_store: FAISS, llm: FusedKVLLM) -> FusedKVRetriever:
    return FusedKVRetriever(retriever=vector_store.as_retriever(search_kwargs={"k": K}), llm=llm)


@pytest.fixture
def chain(retriever: FusedKVRetriever, prompt: PromptTemplate, llm: FusedKVLLM) -> Runnable[str, str]:
    return {"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()


def check(llm: FusedKVLLM) -> None:
    assert llm.last_report is not None
    assert llm.last_report.chunks_found == K
    assert llm.last_report.reused_tokens > 0
    assert llm.last_report.unmatched == []


def test_lcel_in_every_mode_of_calling(chain: Runnable[str, str], llm: FusedKVLLM) -> None:
    answers = [chain.invoke(question) for question in QUESTIONS]
    check(llm)
    assert "".join(chain.stream(QUESTIONS[0])) == answers[0]
    check(llm)
    assert chain.batch(QUESTIONS) == answers

    async def asynchronously() -> tuple[str, str, list[str]]:
        streamed = "".join([piece async for piece in chain.astream(QUESTIONS[0])])
        return await chain.ainvoke(QUESTIONS[0]), streamed, await chain.abatch(QUESTIONS)

    assert asyncio.run(asynchronously()) == (answers[0], answers[0], answers)
    check(llm)


def test_runnable_parallel_and_assign(retriever: FusedKVRetriever, prompt: PromptTemplate, llm: FusedKVLLM) -> None:
    found = RunnableParallel(documents=retriever, question=RunnablePassthrough())
    chain = found.assign(
        answer=RunnablePassthrough.assign(context=lambda state: join(state["documents"])) | prompt | llm
    )
    result = chain.invoke(QUESTIONS[0])
    assert len(result["documents"]) == K
    assert result["answer"]
    check(llm)


def test_a_chat_prompt_template(retriever: FusedKVRetriever, llm: FusedKVLLM) -> None:
    template = ChatPromptTemplate([("system", "Use this:\n{context}"), ("human", "{question}")])
    chain = {"context": retriever | join, "question": RunnablePassthrough()} | template | llm
    chain.invoke(QUESTIONS[0])
    check(llm)


def test_question_before_the_chunks(retriever: FusedKVRetriever, llm: FusedKVLLM) -> None:
    template = PromptTemplate.from_template("Question: {question}\n\n{context}\n\nAnswer:")
    ({"context": retriever | join, "question": RunnablePassthrough()} | template | llm).invoke(QUESTIONS[0])
    check(llm)


def test_retrieval_chains_of_langchain_classic(retriever: FusedKVRetriever, llm: FusedKVLLM) -> None:
    classic = pytest.importorskip("langchain_classic.chains")
    stuff = pytest.importorskip("langchain_classic.chains.combine_documents")
    template = PromptTemplate.from_template("{context}\n\nQuestion: {input}")
    chain = classic.create_retrieval_chain(retriever, stuff.create_stuff_documents_chain(llm, template))
    result = chain.invoke({"input": QUESTIONS[0]})
    assert [doc.metadata["fused_kv_chunk_id"] for doc in result["context"]].count(None) == 0
    check(llm)


def test_history_aware_retrieval_raises_no_alarm(
    retriever: FusedKVRetriever, llm: FusedKVLLM, prompt: PromptTemplate
) -> None:
    classic = pytest.importorskip("langchain_classic.chains")
    rephrase = ChatPromptTemplate([("placeholder", "{chat_history}"), ("human", "{input}")])
    aware = classic.create_history_aware_retriever(llm, retriever, rephrase)
    chain: Any = RunnableParallel(context=aware | join, question=lambda state: state["input"]) | prompt | llm
    history: list[tuple[str, str]] = []
    for question in QUESTIONS:
        answer = chain.invoke({"input": question, "chat_history": history})
        history += [("human", question), ("ai", answer)]
        check(llm)
