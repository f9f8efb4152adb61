"""neighbours="index": chunks are compared by the vectors that a vector store has of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_classic.storage import InMemoryStore
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter
from numpy.typing import NDArray

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.adapter import faiss_vectors
from fused_kv_llm.errors import ConfigError, CorpusError, FusedKVWarning
from langchain_fused_kv import FusedKVLLM, FusedKVVectorStore
from langchain_fused_kv.index_vectors import vectors_of

EMBEDDER = DeterministicFakeEmbedding(size=8)
TEXTS = [f"On day {n} of the year the ferry left Skeldra at {n} past nine with {n} cars." for n in range(3, 9)]


class Refusing:
    """An embedder that must not be asked."""

    name = "refusing"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        raise AssertionError(f"{len(texts)} texts were embedded again")


@pytest.fixture
def fresh(engine: FusedKVEngine, tmp_path: Path) -> Iterator[FusedKVLLM]:
    """An LLM with an empty store, whose own embedder refuses."""
    options: dict[str, Any] = {"embedder": Refusing(), "num_neighbours": 2}
    with FusedKVEngine(engine.loaded, kv_dir=tmp_path / "kv", **options) as made:
        yield FusedKVLLM.from_engine(made, max_tokens=2)


class ChromaLike(InMemoryVectorStore):
    """Gives documents and embeddings out as Chroma does."""

    def get(self, include: list[str]) -> dict[str, Any]:
        entries = list(self.store.values())
        named = {"documents": "text", "embeddings": "vector"}
        return {name: [entry[named[name]] for entry in entries] for name in include}


def chroma() -> ChromaLike:
    made = ChromaLike.from_texts(TEXTS, EMBEDDER)
    made.store = _Hidden(made.store)  # type: ignore[assignment]
    return made


class _Hidden:
    """A store's entries, but no dict."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.values = entries.values


SOURCES = {
    "FAISS": lambda: FAISS.from_texts(TEXTS, EMBEDDER),
    "InMemoryVectorStore": lambda: InMemoryVectorStore.from_texts(TEXTS, EMBEDDER),
    "Chroma": chroma,
    "retriever": lambda: FAISS.from_texts(TEXTS, EMBEDDER).as_retriever(),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_stores_give_their_vectors_out(source: Any) -> None:
    found = vectors_of(source())
    for text, vector in zip(TEXTS, EMBEDDER.embed_documents(TEXTS), strict=True):
        assert np.allclose(found[text], vector, rtol=1e-5)


def test_nothing_is_embedded_again(fresh: FusedKVLLM) -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, EMBEDDER)
    report = fresh.build_kv_cache(store, neighbours="index", preprocess="wait", progress=False)
    assert report.chunks_new == report.chunks_preprocessed == len(TEXTS)
    units = np.array(EMBEDDER.embed_documents(TEXTS))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    near = np.argsort(-(units @ units.T), axis=1)
    graph = fresh.engine.corpus._preprocessor._plans.graph  # type: ignore[union-attr]
    key_of = [fresh.engine.chunk_id(text) for text in TEXTS]
    for row, key in enumerate(key_of):
        assert key is not None
        assert graph.neighbours(key) == tuple(key_of[other] for other in near[row] if other != row)[:2]


def test_documents_that_come_later_are_compared_too(fresh: FusedKVLLM) -> None:
    store = FusedKVVectorStore(InMemoryVectorStore(EMBEDDER), fresh, neighbours="index")
    store.add_texts(TEXTS[:4])
    store.add_documents([Document(text) for text in TEXTS[4:]])
    fresh.engine.wait_for_background()
    engine = fresh.engine
    assert all(engine.store.sidecars.has(engine.chunk_id(text), engine._parts.shift_name) for text in TEXTS)
    assert len(fresh.engine.stored_texts()) == len(TEXTS)


def test_chunks_without_a_vector_are_named(fresh: FusedKVLLM) -> None:
    store = InMemoryVectorStore.from_texts(TEXTS[:3], EMBEDDER)
    wrapped = FusedKVVectorStore(store, fresh, neighbours="index")
    with pytest.warns(FusedKVWarning, match="2 of 3 chunks have no vector in the index"):
        wrapped._ingest([TEXTS[0], *TEXTS[3:5]])
    with pytest.raises(CorpusError, match="the index has 3 vectors, but none of these 1 chunks"):
        wrapped._ingest(TEXTS[5:])


def test_sources_without_vectors_are_refused(fresh: FusedKVLLM) -> None:
    with pytest.raises(CorpusError, match="list gives no vectors out"):
        fresh.build_kv_cache(TEXTS, neighbours="index")
    parents = ParentDocumentRetriever(
        vectorstore=FAISS.from_texts(["-"], EMBEDDER),
        docstore=InMemoryStore(),
        child_splitter=CharacterTextSplitter(" "),
    )
    with pytest.raises(CorpusError, match="ParentDocumentRetriever gives no vectors out"):
        vectors_of(parents)
    with pytest.raises(ConfigError, match="neighbours='vectors' is unknown"):
        fresh.build_kv_cache(TEXTS, neighbours="vectors")  # type: ignore[arg-type]
    assert fresh.engine.stored_texts() == []


def test_vectors_of_faiss_are_in_their_order_or_refused() -> None:
    vectors = np.array(EMBEDDER.embed_documents(TEXTS), np.float32)
    coarse = faiss.IndexIVFFlat(faiss.IndexFlatL2(8), 8, 2)
    coarse.train(vectors)
    for index in (faiss.IndexFlatIP(8), faiss.IndexHNSWFlat(8, 4), coarse):
        index.add(vectors)
        assert np.array_equal(faiss_vectors(index), vectors)
    store = FAISS.from_texts(TEXTS, EMBEDDER)
    # This one would end the process.
    store.index = faiss.IndexIDMap(faiss.IndexFlatL2(8))
    with pytest.raises(CorpusError, match="kind IndexIDMap cannot be read"):
        vectors_of(store)
