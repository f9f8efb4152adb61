"""Vectors that a vector store has of its documents are not made again to find similar chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_classic.storage import InMemoryStore
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import CharacterTextSplitter

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.adapter import faiss_vectors
from langchain_fused_kv import FusedKVLLM, FusedKVRetriever, FusedKVVectorStore
from langchain_fused_kv.index_vectors import store_of, vectors_of

TEXTS = [f"On day {n} of the year the ferry left Skeldra at {n} past nine with {n} cars." for n in range(3, 9)]


class Counting(Embeddings):
    """Embeds, and says how many texts."""

    def __init__(self, model: str = "counting", size: int = 8) -> None:
        self.model, self.count, self._inner = model, 0, DeterministicFakeEmbedding(size=size)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.count += len(texts)
        return self._inner.embed_documents(texts)

    def embed_query(self, text: str) -> list[float]:
        return self._inner.embed_query(text)


@pytest.fixture
def embedder() -> Counting:
    return Counting()


@pytest.fixture
def llm_with(engine: FusedKVEngine, tmp_path: Path) -> Iterator[Callable[[Any], FusedKVLLM]]:
    """Makes an LLM with an empty store and an embedder."""
    made: list[FusedKVEngine] = []

    def make(embedder: Any) -> FusedKVLLM:
        folder = tmp_path / f"kv{len(made)}"
        made.append(FusedKVEngine(engine.loaded, kv_dir=folder, embedder=embedder, num_neighbours=2))
        return FusedKVLLM.from_engine(made[-1], max_tokens=2)

    yield make
    for one in made:
        one.close()


class ChromaLike(VectorStore):
    """Gives documents and embeddings out as Chroma does."""

    def __init__(self, embedding: Embeddings) -> None:
        self._inner = InMemoryVectorStore(embedding)

    @property
    def embeddings(self) -> Embeddings:
        return self._inner.embedding

    def add_texts(self, texts: Any, metadatas: Any = None, **kwargs: Any) -> list[str]:
        return self._inner.add_texts(texts, metadatas, **kwargs)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return self._inner.similarity_search(query, k, **kwargs)

    @classmethod
    def from_texts(cls, texts: Any, embedding: Embeddings, metadatas: Any = None, **kwargs: Any) -> ChromaLike:
        raise NotImplementedError

    def get(self, include: list[str], ids: list[str] | None = None) -> dict[str, Any]:
        entries = self._inner.store
        found = [entries[id_] for id_ in (entries if ids is None else ids)]
        named = {"documents": "text", "embeddings": "vector"}
        return {name: [entry[named[name]] for entry in found] for name in include}


def chroma(embedder: Counting) -> ChromaLike:
    made = ChromaLike(embedder)
    made.add_texts(TEXTS)
    return made


def test_only_what_was_added_is_read(embedder: Counting) -> None:
    for store in (InMemoryVectorStore(embedder), FAISS.from_texts(["-"], embedder), ChromaLike(embedder)):
        store.add_texts(TEXTS[:2])
        assert list(vectors_of(store, store.add_texts(TEXTS[2:5]))) == TEXTS[2:5]


STORES = {
    "FAISS": lambda embedder: FAISS.from_texts(TEXTS, embedder),
    "InMemoryVectorStore": lambda embedder: InMemoryVectorStore.from_texts(TEXTS, embedder),
    "Chroma": chroma,
}


@pytest.mark.parametrize("made", STORES.values(), ids=STORES)
def test_stores_give_their_vectors_out(made: Callable[[Counting], VectorStore], embedder: Counting) -> None:
    found = vectors_of(made(embedder))
    for text, vector in zip(TEXTS, embedder.embed_documents(TEXTS), strict=True):
        assert np.allclose(found[text], vector, rtol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [*STORES.values(), lambda embedder: FAISS.from_texts(TEXTS, embedder).as_retriever()])
def test_nothing_is_embedded_again(
    made: Callable[[Counting], Any], embedder: Counting, llm_with: Callable[[Any], FusedKVLLM]
) -> None:
    llm, other = llm_with(embedder), llm_with(Counting())
    report = llm.build_kv_cache(made(embedder), preprocess="wait", progress=False)
    assert report.chunks_new == report.chunks_preprocessed == embedder.count == len(TEXTS)
    other.build_kv_cache(TEXTS, preprocess="wait", progress=False)
    for text in TEXTS:
        key = llm.engine.chunk_id(text) or ""
        graphs = (one.engine.corpus._preprocessor._plans.graph for one in (llm, other))  # type: ignore[union-attr]
        mine, embedded = (graph.neighbours(key) for graph in graphs)
        assert len(mine) == 2
        assert mine == embedded


@pytest.mark.parametrize("with_faiss", [False, True])
def test_documents_that_come_one_by_one_are_compared_with_all(
    with_faiss: bool, embedder: Counting, llm_with: Callable[[Any], FusedKVLLM]
) -> None:
    llm = llm_with(embedder)
    inner = FAISS.from_texts(["-"], embedder) if with_faiss else InMemoryVectorStore(embedder)
    embedder.count = 0
    store = FusedKVVectorStore(inner, llm)
    for text in TEXTS[:-1]:
        store.add_texts([text])
    store.add_documents([Document(f"{TEXTS[-1]}\n")])
    llm.engine.wait_for_background()
    assert embedder.count == len(TEXTS)
    keys = [llm.engine.chunk_id(text) or "" for text in TEXTS]
    assert all(llm.engine.store.sidecars.has(key, llm.engine._parts.shift_name or "") for key in keys)


@pytest.mark.parametrize("own", [Counting("another"), Counting("unknown"), Counting("Counting")])
def test_another_embedder_embeds_itself(own: Counting, llm_with: Callable[[Any], FusedKVLLM]) -> None:
    theirs = Counting(own.model if own.model != "another" else "theirs")
    llm = llm_with(own)
    llm.build_kv_cache(InMemoryVectorStore.from_texts(TEXTS, theirs), preprocess="wait", progress=False)
    assert own.count == len(TEXTS)


def test_vectors_of_a_model_of_that_name_are_taken(llm_with: Callable[[Any], FusedKVLLM]) -> None:
    own, theirs = Counting("e5"), Counting("e5")
    llm_with(own).build_kv_cache(InMemoryVectorStore.from_texts(TEXTS, theirs), preprocess="wait", progress=False)
    assert own.count == 0


def test_vectors_that_say_nothing_are_made_again(embedder: Counting, llm_with: Callable[[Any], FusedKVLLM]) -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, embedder)
    bad: list[Any] = [None, [float("nan")] * 8, [0.0] * 8]
    for entry, vector in zip(store.store.values(), bad, strict=False):
        entry["vector"] = vector
    report = llm_with(embedder).build_kv_cache(store, preprocess="wait", progress=False)
    assert report.chunks_preprocessed == len(TEXTS)
    assert embedder.count == len(TEXTS) + len(bad)


def test_vectors_of_several_lengths_are_left_alone(embedder: Counting, llm_with: Callable[[Any], FusedKVLLM]) -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, embedder)
    next(iter(store.store.values()))["vector"] = [1.0]
    report = llm_with(embedder).build_kv_cache(store, preprocess="wait", progress=False)
    assert report.chunks_preprocessed == len(TEXTS)
    assert embedder.count == 2 * len(TEXTS)


def test_where_the_vectors_of_a_source_are(embedder: Counting, llm_with: Callable[[Any], FusedKVLLM]) -> None:
    inner, llm = FAISS.from_texts(TEXTS, embedder), llm_with(embedder)
    parents = ParentDocumentRetriever(
        vectorstore=inner, docstore=InMemoryStore(), child_splitter=CharacterTextSplitter(" ")
    )
    for source in (inner, FusedKVVectorStore(inner, llm), FusedKVRetriever(retriever=inner.as_retriever(), llm=llm)):
        assert store_of(source) is inner
    assert store_of(TEXTS) is store_of(parents) is None


def test_vectors_of_faiss_are_in_their_order_or_left_alone(embedder: Counting) -> None:
    vectors = np.array(embedder.embed_documents(TEXTS), np.float32)
    for index in (faiss.IndexFlatIP(8), faiss.IndexHNSWFlat(8, 4)):
        index.add(vectors)
        assert np.array_equal(faiss_vectors(index, [4, 1]), vectors[[4, 1]])  # type: ignore[arg-type]
        # These would end the process, as that below.
        assert faiss_vectors(index, [len(vectors)]) is faiss_vectors(index, []) is None
    store = FAISS.from_texts(TEXTS, embedder)
    store.delete([store.index_to_docstore_id[1]])
    assert np.allclose(vectors_of(store)[TEXTS[2]], vectors[2], rtol=1e-5)  # type: ignore[arg-type]
    store.index = faiss.IndexIDMap(faiss.IndexFlatL2(8))
    assert vectors_of(store) == {}


def test_stores_that_give_nothing_out() -> None:
    class Refusing:
        def get(self, include: list[str]) -> dict[str, Any]:
            raise NotImplementedError

    class WithoutEmbeddings:
        def get(self, include: list[str]) -> dict[str, Any]:
            return {"documents": TEXTS, "embeddings": None}

    assert vectors_of(object()) == vectors_of(Refusing()) == vectors_of(WithoutEmbeddings()) == {}
