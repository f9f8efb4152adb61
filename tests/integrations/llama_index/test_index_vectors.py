"""neighbours="index": nodes are compared by the vectors that their index has of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import faiss
import numpy as np
import pytest
from llama_index.core import Document, StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.simple import SimpleVectorStore
from llama_index.vector_stores.faiss import FaissVectorStore
from numpy.typing import NDArray

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo.llama_embedder import MiniLMEmbedding
from fused_kv_llm.errors import CorpusError
from llama_index_fused_kv import FusedKVIndex, FusedKVLLM, build_kv_cache
from llama_index_fused_kv.index_vectors import vectors_of

TEXTS = [f"On day {n} of the year the ferry left Skeldra at {n} past nine with {n} cars." for n in range(3, 8)]


class Refusing:
    """An embedder that must not be asked."""

    name = "refusing"

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        raise AssertionError(f"{len(texts)} texts were embedded again")


@pytest.fixture
def fresh(engine: FusedKVEngine, tmp_path: Path) -> Iterator[FusedKVLLM]:
    """An LLM with an empty store, whose own embedder refuses."""
    with FusedKVEngine(engine.loaded, kv_dir=tmp_path / "kv", embedder=Refusing()) as made:
        yield FusedKVLLM.from_engine(made, max_tokens=2)


def nodes() -> list[TextNode]:
    return [TextNode(text=text, id_=f"node-{number}") for number, text in enumerate(TEXTS)]


@pytest.mark.parametrize("with_faiss", [False, True])
def test_an_index_gives_its_vectors_out(embed_model: MiniLMEmbedding, with_faiss: bool) -> None:
    store = FaissVectorStore(faiss_index=faiss.IndexFlatL2(384)) if with_faiss else SimpleVectorStore()
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex(nodes(), embed_model=embed_model, storage_context=context)
    for source in (index, index.as_retriever()):
        found = vectors_of(source)
        for text, vector in zip(TEXTS, embed_model.get_text_embedding_batch(TEXTS), strict=True):
            assert np.allclose(found[text], vector, atol=1e-6)


def test_nodes_may_carry_their_vectors() -> None:
    carrying = [TextNode(text=text, embedding=[float(number), 1.0]) for number, text in enumerate(TEXTS)]
    assert vectors_of(carrying) == {text: [float(number), 1.0] for number, text in enumerate(TEXTS)}


def test_nothing_is_embedded_again(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    index = VectorStoreIndex(nodes(), embed_model=embed_model)
    report = build_kv_cache(index, fresh, neighbours="index", preprocess="wait", progress=False)
    assert report.chunks_new == report.chunks_preprocessed == len(TEXTS)
    again = fresh.build_kv_cache(index, neighbours="index", preprocess="wait", progress=False)
    assert (again.chunks_new, again.chunks_preprocessed) == (0, 0)


def test_nodes_that_are_inserted_later_are_compared_too(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    index = FusedKVIndex(nodes(), embed_model=embed_model)
    index.build_kv_cache(fresh, neighbours="index", progress=False)
    index.insert(Document(text="The harbour office at Skeldra opens at six in the morning, and closes at eight."))
    fresh.engine.wait_for_background()
    engine = fresh.engine
    stored = engine.stored_texts()
    assert all(engine.store.sidecars.has(engine.chunk_id(text), engine._parts.shift_name) for text in stored)
    assert len(stored) == len(TEXTS) + 1


def test_an_index_without_vectors_is_refused(fresh: FusedKVLLM) -> None:
    with pytest.raises(CorpusError, match="SummaryIndex gives no vectors"):
        build_kv_cache(SummaryIndex(nodes()), fresh, neighbours="index")
    assert fresh.engine.stored_texts() == []
