"""Vectors that an index has of its nodes are not made again to find similar chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llama_index.vector_stores.faiss import FaissVectorStore

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo.llama_embedder import MiniLMEmbedding
from llama_index_fused_kv import FusedKVIndex, FusedKVLLM, build_kv_cache
from llama_index_fused_kv.index_vectors import vectors_of

TEXTS = [f"On day {n} of the year the ferry left Skeldra at {n} past nine with {n} cars." for n in range(3, 8)]


class Counting(MiniLMEmbedding):
    """Embeds, and says how many texts."""

    def __init__(self) -> None:
        super().__init__(model_name="counting")
        self._count = 0

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        self._count += len(texts)
        return super()._get_text_embeddings(texts)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._get_text_embeddings(texts)


@pytest.fixture
def embedder() -> Counting:
    return Counting()


@pytest.fixture
def fresh(engine: FusedKVEngine, tmp_path: Path, embedder: Counting) -> Iterator[FusedKVLLM]:
    """An LLM with an empty store and the embedder of the indexes."""
    with FusedKVEngine(engine.loaded, kv_dir=tmp_path / "kv", embedder=embedder) as made:
        yield FusedKVLLM.from_engine(made, max_tokens=2)


def nodes() -> list[TextNode]:
    return [
        TextNode(text=text, id_=f"node-{number}", metadata={"page": str(number)}) for number, text in enumerate(TEXTS)
    ]


def index_of(embedder: Counting, with_faiss: bool = False) -> VectorStoreIndex:
    store = FaissVectorStore(faiss_index=faiss.IndexFlatL2(384)) if with_faiss else SimpleVectorStore()
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(nodes(), embed_model=embedder, storage_context=context)


@pytest.mark.parametrize("with_faiss", [False, True])
def test_an_index_gives_its_vectors_out(embedder: Counting, with_faiss: bool) -> None:
    found = vectors_of(index_of(embedder, with_faiss), nodes())
    contents = [node.get_content(MetadataMode.EMBED) for node in nodes()]
    for text, vector in zip(TEXTS, embedder.get_text_embedding_batch(contents), strict=True):
        assert np.allclose(found[text], vector, atol=1e-5)  # type: ignore[arg-type]


def test_nodes_may_carry_their_vectors(embedder: Counting) -> None:
    index = index_of(embedder, with_faiss=True)
    index.vector_store._faiss_index = faiss.IndexIDMap(faiss.IndexFlatL2(384))  # type: ignore[attr-defined]
    carrying = [TextNode(text=text, embedding=[float(number), 1.0]) for number, text in enumerate(TEXTS)]
    assert vectors_of(index, carrying) == {text: [float(number), 1.0] for number, text in enumerate(TEXTS)}


@pytest.mark.parametrize("with_faiss", [False, True])
@pytest.mark.parametrize("way", ["function", "retriever", "method", "nodes"])
def test_nothing_is_embedded_again(fresh: FusedKVLLM, embedder: Counting, with_faiss: bool, way: str) -> None:
    index, options = index_of(embedder, with_faiss), {"preprocess": "wait", "progress": False}
    calls: dict[str, Any] = {
        "function": lambda: build_kv_cache(index, fresh, **options),  # type: ignore[arg-type]
        "retriever": lambda: build_kv_cache(index.as_retriever(), fresh, **options),  # type: ignore[arg-type]
        "method": lambda: fresh.build_kv_cache(index, **options),  # type: ignore[arg-type]
        "nodes": lambda: build_kv_cache(index, fresh, nodes=iter(nodes()), **options),  # type: ignore[arg-type]
    }
    report = calls[way]()
    assert report.chunks_new == report.chunks_preprocessed == embedder._count == len(TEXTS)


def test_nodes_alone_are_embedded(fresh: FusedKVLLM, embedder: Counting) -> None:
    assert build_kv_cache(nodes(), fresh, preprocess="wait", progress=False).chunks_preprocessed == len(TEXTS)
    assert embedder._count == len(TEXTS)


def test_nodes_that_are_inserted_one_by_one_are_compared_with_all(fresh: FusedKVLLM, embedder: Counting) -> None:
    index = FusedKVIndex([], embed_model=embedder)
    build_kv_cache([TEXTS[0]], fresh, progress=False)
    index._kv_llm = fresh
    for text in TEXTS[1:4]:
        index.insert(Document(text=text))
    asyncio.run(index.ainsert_nodes([TextNode(text=TEXTS[4])]))
    fresh.engine.wait_for_background()
    assert embedder._count == len(TEXTS)
    engine = fresh.engine
    keys = [engine.chunk_id(text) or "" for text in TEXTS]
    assert all(engine.store.sidecars.has(key, engine._parts.shift_name or "") for key in keys)
