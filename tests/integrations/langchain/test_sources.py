"""Where the documents of a corpus may be taken from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import EmbeddingsFilter
from langchain_community.document_loaders import DirectoryLoader, TextLoader
from langchain_community.retrievers import KNNRetriever
from langchain_community.vectorstores import FAISS
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import CharacterTextSplitter

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import CorpusError
from langchain_fused_kv import FusedKVLLM, FusedKVRetriever, FusedKVVectorStore
from langchain_fused_kv.sources import documents_of

TEXTS = [f"On day {n} of the year the ferry left Skeldra at {n} past nine with {n} cars." for n in range(3, 8)]
EMBEDDER = DeterministicFakeEmbedding(size=8)


@pytest.fixture
def fresh(engine: FusedKVEngine, tmp_path: Path) -> Iterator[FusedKVLLM]:
    """An LLM with an empty store, on the weights that are loaded already."""
    with FusedKVEngine(engine.loaded, kv_dir=tmp_path / "kv", preprocessing="none") as made:
        yield FusedKVLLM.from_engine(made, max_tokens=2)


class _Hidden(VectorStore):
    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return []

    @classmethod
    def from_texts(cls, texts: Any, embedding: Any, metadatas: Any = None, **kwargs: Any) -> Any:
        return cls()


class ChromaLike(_Hidden):
    """Gives its documents out as Chroma does."""

    def get(self, include: list[str]) -> dict[str, list[str] | None]:
        return {"ids": ["a"], "embeddings": None, **{name: TEXTS for name in include if name == "documents"}}


def texts_of(source: Any) -> list[str]:
    return [item if isinstance(item, str) else item.page_content for item in documents_of(source)]


def faiss(texts: list[str] = TEXTS) -> FAISS:
    return FAISS.from_texts(texts, EMBEDDER)


def parents() -> ParentDocumentRetriever:
    made = ParentDocumentRetriever(
        vectorstore=faiss(["-"]),
        docstore=InMemoryStore(),
        child_splitter=CharacterTextSplitter(" ", chunk_size=20, chunk_overlap=0),
    )
    made.add_documents([Document(text) for text in TEXTS])
    return made


def document_store() -> InMemoryStore:
    made = InMemoryStore()
    made.mset([(str(n), Document(text)) for n, text in enumerate(TEXTS)])
    return made


def compressing() -> BaseRetriever:
    return ContextualCompressionRetriever(
        base_compressor=EmbeddingsFilter(embeddings=EMBEDDER, k=2), base_retriever=faiss().as_retriever()
    )


SOURCES = {
    "list": lambda: TEXTS,
    "generator": lambda: (Document(text) for text in TEXTS),
    "FAISS": faiss,
    "InMemoryVectorStore": lambda: InMemoryVectorStore.from_texts(TEXTS, EMBEDDER),
    "Chroma": ChromaLike,
    "docstore": document_store,
    "retriever": lambda: faiss().as_retriever(),
    "parents": parents,
    "compression": compressing,
    "ensemble": lambda: EnsembleRetriever(
        retrievers=[faiss(TEXTS[:2]).as_retriever(), faiss(TEXTS[2:]).as_retriever()]
    ),
    "KNN": lambda: KNNRetriever.from_texts(TEXTS, EMBEDDER),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_source_gives_its_documents_out(source: Any) -> None:
    assert sorted(texts_of(source())) == sorted(TEXTS)


def test_wrappers_are_looked_through(fresh: FusedKVLLM) -> None:
    wrapped = FusedKVRetriever(retriever=faiss().as_retriever(), llm=fresh)
    several = MultiQueryRetriever.from_llm(wrapped, fresh)
    assert sorted(texts_of(several)) == sorted(texts_of(FusedKVVectorStore(faiss(), fresh))) == sorted(TEXTS)
    assert fresh.build_kv_cache(several, progress=False).chunks_new == len(TEXTS)


def test_a_folder_through_loader_and_splitter(fresh: FusedKVLLM, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS[:3]))
    (tmp_path / "b.txt").write_text(TEXTS[3])
    loader = DirectoryLoader(str(tmp_path), glob="*.txt", loader_cls=TextLoader)
    chunks = loader.load_and_split(CharacterTextSplitter(chunk_size=100, chunk_overlap=0))
    assert fresh.build_kv_cache(chunks, progress=False).chunks_new == 4
    assert fresh.build_kv_cache(loader, progress=False).chunks_total == 2


def test_prune_deletes_what_left_the_corpus(fresh: FusedKVLLM) -> None:
    fresh.build_kv_cache(TEXTS[:3], progress=False)
    report = fresh.build_kv_cache(faiss(TEXTS[2:4]), prune=True, progress=False)
    assert (report.chunks_new, report.chunks_present, report.chunks_deleted) == (1, 1, 2)
    assert fresh.engine.stored_texts() == TEXTS[2:4]


class _OtherGet(_Hidden):
    def get(self, key: str) -> None:
        raise NotImplementedError


class _HiddenRetriever(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (_Hidden(), r"_Hidden does not give its documents out: pass the documents"),
        (_OtherGet(), r"_OtherGet does not give its documents out .*pass the documents"),
        (_Hidden().as_retriever(), "_Hidden does not give"),
        (_HiddenRetriever(), "_HiddenRetriever does not show where"),
        ("one text", "put the single one into a list"),
        (Document("one"), "put the single one into a list"),
        (3, "documents out of a int"),
    ],
)
def test_what_hides_its_documents_is_named(source: Any, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        documents_of(source)
