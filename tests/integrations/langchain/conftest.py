"""One real model, one real corpus and one FAISS index for all tests of the LangChain adapters."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo.embedder import MiniLM
from fused_kv_llm.demo.passages import read_passages
from langchain_fused_kv import FusedKVLLM

K = 4


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    handbook = Path(str(files("fused_kv_llm.demo") / "handbook"))
    passages = read_passages([handbook / "01-fleet.txt", handbook / "12-history.txt"])
    return [Document(passage.text, metadata={"source": passage.source}) for passage in passages]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, documents: list[Document]) -> Iterator[FusedKVEngine]:
    with FusedKVEngine("smollm2-135m", kv_dir=tmp_path_factory.mktemp("kv")) as made:
        made.build_kv_cache([doc.page_content for doc in documents], progress=False)
        yield made


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
