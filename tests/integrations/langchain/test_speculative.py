"""FusedKVRetriever(speculative=True): chains answer what the final documents say, and begin before they are final."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
import pytest
from langchain_community.docstore.in_memory import InMemoryDocstore
from langchain_community.vectorstores import FAISS
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from pydantic import Field

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo.embedder import MiniLM
from fused_kv_llm.serving import RequestState, loop_of
from langchain_fused_kv import ChatFusedKV, FusedKVLLM, FusedKVRetriever, QuickFirstRetriever, StagedFaissRetriever

QUESTION = "How many passengers can the Aldebaran carry?"
CHAT = ChatPromptTemplate.from_messages([("system", "Answer briefly."), ("human", "{context}\n\n{question}")])


def join(found: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in found)


class Slow(BaseRetriever):
    """Yields given stages; waits until each is computed before the next."""

    stages_: list[list[Document]]
    engine: Any
    seen: list[Any] = Field(default_factory=list)

    def stages(self, query: str) -> Iterator[list[Document]]:
        for number, found in enumerate(self.stages_):
            yield found
            if number < len(self.stages_) - 1:
                self._wait_until_held()

    def _wait_until_held(self) -> None:
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            requests = loop_of(self.engine.model).scheduler.requests()
            if any(one.state is RequestState.HELD for one in requests):
                self.seen.append([one.handle for one in requests])
                return
            time.sleep(0.005)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        raise AssertionError("its stages are asked")


def chain_of(retriever: Any, template: Any, llm: Any) -> Any:
    return {"context": retriever | join, "question": RunnablePassthrough()} | template | llm


def speculative(retriever: Any, template: Any, llm: Any) -> FusedKVRetriever:
    def prompt(query: str, found: list[Document]) -> Any:
        return template.invoke({"context": join(found), "question": query})

    return FusedKVRetriever(retriever=retriever, llm=llm, speculative=True, prompt=prompt)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("kind", [FusedKVLLM, ChatFusedKV])
def test_chains_take_up_what_was_proposed(
    engine: FusedKVEngine, documents: list[Document], kind: Any, right: bool, prompt: PromptTemplate
) -> None:
    llm, template = kind.from_engine(engine, max_tokens=6), CHAT if kind is ChatFusedKV else prompt
    final = documents[:2]
    slow = Slow(stages_=[final if right else documents[3:5], final], engine=engine)
    want = (template | llm).invoke({"context": join(final), "question": QUESTION})
    answer = chain_of(speculative(slow, template, llm), template, llm).invoke(QUESTION)

    def text(one):
        return getattr(one, "content", one)

    assert text(answer) == text(want)
    report = llm.last_report
    assert report.speculation == ("confirmed" if right else "corrected")
    assert report.search_hidden_s > 0
    assert report.speculations_dropped == (not right)
    assert len(slow.seen) == 1
    assert loop_of(engine.model)._open == 0


def test_a_search_that_fails_leaves_nothing(engine: FusedKVEngine, documents: list[Document], llm: Any) -> None:
    # Tests below leave proposals that nobody asks for, which are held for ten seconds; those above leave none.
    assert loop_of(engine.model)._open == 0

    class Failing(Slow):
        def stages(self, query: str) -> Iterator[list[Document]]:
            yield self.stages_[0]
            self._wait_until_held()
            raise OSError("the index is gone")

    retriever = speculative(Failing(stages_=[documents[:1]], engine=engine), CHAT, llm)
    with pytest.raises(OSError, match="the index is gone"):
        retriever.invoke(QUESTION)
    until_s = time.monotonic() + 5
    while loop_of(engine.model)._open and time.monotonic() < until_s:
        time.sleep(0.01)
    assert loop_of(engine.model)._open == 0


def test_asynchronously_and_with_a_prompt_that_turns_out_to_be_another(
    engine: FusedKVEngine, documents: list[Document], prompt: PromptTemplate, llm: FusedKVLLM
) -> None:
    other = PromptTemplate.from_template("Other: {context} {question}")
    slow = Slow(stages_=[documents[:1], documents[:1]], engine=engine)
    chain = chain_of(speculative(slow, other, llm), prompt, llm)
    want = (prompt | llm).invoke({"context": join(documents[:1]), "question": QUESTION})
    assert asyncio.run(chain.ainvoke(QUESTION)) == want
    assert llm.last_report.speculation == ""


def ivf_store(documents: list[Document]) -> FAISS:
    embedder = MiniLM()
    vectors = np.array(embedder.embed_documents([doc.page_content for doc in documents]), np.float32)
    index = faiss.index_factory(vectors.shape[1], "IVF4,Flat")
    index.train(vectors)
    index.add(vectors)
    index.nprobe = 4
    ids = {number: str(number) for number in range(len(documents))}
    return FAISS(embedder, index, InMemoryDocstore(dict(zip(ids.values(), documents, strict=True))), ids)


def test_faiss_stores_are_searched_in_stages(documents: list[Document], llm: FusedKVLLM, prompt: Any) -> None:
    store = ivf_store(documents)
    want = [doc.page_content for doc in store.similarity_search(QUESTION, k=3)]
    staged = StagedFaissRetriever(vector_store=store, k=3)
    found = [[doc.page_content for doc in stage] for stage in staged.stages(QUESTION)]
    assert len(found) == 3
    assert found[-1] == want
    assert [doc.page_content for doc in staged.invoke(QUESTION)] == want
    plain = store.as_retriever(search_kwargs={"k": 3})
    wrapped = speculative(plain, prompt, llm)
    assert [doc.page_content for doc in wrapped.invoke(QUESTION)] == want
    assert len(wrapped.invoke(QUESTION, k=1)) == 1
    answer = chain_of(wrapped, prompt, llm).invoke(QUESTION)
    assert answer == (prompt | llm).invoke({"context": "\n\n".join(want), "question": QUESTION})


def test_a_quick_retriever_in_front_of_a_slow_one(documents: list[Document], llm: FusedKVLLM, prompt: Any) -> None:
    store = ivf_store(documents)
    quick = store.as_retriever(search_kwargs={"k": 1})
    both = QuickFirstRetriever(quick=quick, slow=store.as_retriever(search_kwargs={"k": 2}))
    found = speculative(both, prompt, llm).invoke(QUESTION)
    assert [doc.page_content for doc in found] == [doc.page_content for doc in both.invoke(QUESTION)]
    assert len(found) == 2


def test_what_cannot_be_speculated_on_is_refused(vector_store: FAISS, llm: FusedKVLLM) -> None:
    similar = vector_store.as_retriever(search_type="mmr")
    with pytest.raises(ValueError, match="search_type='mmr'"):
        FusedKVRetriever(retriever=similar, llm=llm, speculative=True)
    with pytest.raises(ValueError, match="QuickFirstRetriever"):
        FusedKVRetriever(retriever=RunnablePassthrough(), llm=llm, speculative=True)
    with pytest.raises(ValueError, match="only used with speculative"):
        FusedKVRetriever(retriever=similar, llm=llm, prompt=lambda query, found: query)
