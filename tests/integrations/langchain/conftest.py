"""Documents, a FAISS index and prompts for all tests of the LangChain adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from reuse import RETRIEVED, Requests

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo.embedder import MiniLM
from fused_kv_llm.demo.passages import Passage
from fused_kv_llm.errors import FusedKVWarning
from langchain_fused_kv import FusedKVLLM, FusedKVRetriever


@pytest.fixture(scope="session")
def documents(passages: list[Passage]) -> list[Document]:
    return [Document(passage.text, metadata={"source": passage.source}) for passage in passages]


@pytest.fixture(scope="session")
def vector_store(documents: list[Document]) -> FAISS:
    return FAISS.from_documents(documents, MiniLM())


@pytest.fixture
def llm(engine: FusedKVEngine) -> FusedKVLLM:
    return FusedKVLLM.from_engine(engine, max_tokens=12)


@pytest.fixture
def prompt() -> PromptTemplate:
    return PromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")


@pytest.fixture
def prompts(documents: list[Document]) -> list[str]:
    """Four prompts of two passages each, all different."""
    texts = [doc.page_content for doc in documents]
    asked = [
        "How many cars fit?",
        "What happened in 1998?",
        "Who owns the ferries?",
        "How fast is the vessel?",
    ]
    return [f"{texts[i]}\n\n{texts[i + 5]}\n\nQuestion: {question}" for i, question in enumerate(asked)]


@pytest.fixture
def requests(llm: FusedKVLLM, monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(llm, monkeypatch)


@pytest.fixture
def retriever(vector_store: FAISS, llm: FusedKVLLM) -> FusedKVRetriever:
    return FusedKVRetriever(retriever=vector_store.as_retriever(search_kwargs={"k": RETRIEVED}), llm=llm)


@pytest.fixture
def passed_verbatim() -> Iterator[None]:
    """Fail where the LLM warns that what was retrieved is not in the prompt."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedKVWarning)
        yield
