"""FusedKVVectorStore: KV follows a vector store, and LangChain's own index() with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError, FusedKVWarning
from langchain_fused_kv import FusedKVLLM, FusedKVVectorStore

EMBEDDER = DeterministicFakeEmbedding(size=8)


@pytest.fixture
def fresh(engine: FusedKVEngine, tmp_path: Path) -> Iterator[FusedKVLLM]:
    """An LLM with an empty store, on the weights that are loaded already."""
    with FusedKVEngine(engine.loaded, kv_dir=tmp_path / "kv", preprocessing="none") as made:
        yield FusedKVLLM.from_engine(made, max_tokens=2)


def document(number: int, source: str, **metadata: Any) -> Document:
    text = f"On day {number} of the year the ferry left Skeldra at {number} past nine with {number} cars."
    return Document(text, metadata={"source": source, **metadata})


def kept(llm: FusedKVLLM, *documents: Document) -> None:
    assert sorted(llm.engine.stored_texts()) == sorted({doc.page_content for doc in documents})


def inode(llm: FusedKVLLM, doc: Document) -> tuple[int, int]:
    """What changes when a chunk's file is written again."""
    stat = next(llm.engine.store.kv_dir.rglob(f"{llm.engine.chunk_id(doc.page_content)}*")).stat()
    return stat.st_ino, stat.st_mtime_ns


@pytest.mark.parametrize("inner", [InMemoryVectorStore(EMBEDDER), FAISS.from_texts(["-"], EMBEDDER)])
def test_full_indexing(fresh: FusedKVLLM, inner: VectorStore) -> None:
    store, records = FusedKVVectorStore(inner, fresh), InMemoryRecordManager("ferries")
    options: Any = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
    first, second, third = (document(n, "log") for n in (3, 4, 5))
    assert index([first, second], records, store, **options)["num_added"] == 2
    kept(fresh, first, second)
    before = inode(fresh, first)
    assert index([first, third], records, store, **options) == {
        "num_added": 1, "num_deleted": 1, "num_skipped": 1, "num_updated": 0
    }  # fmt: skip
    kept(fresh, first, third)
    assert inode(fresh, first) == before


def test_a_document_whose_metadata_changed_keeps_its_kv(fresh: FusedKVLLM) -> None:
    store, records = FusedKVVectorStore(InMemoryVectorStore(EMBEDDER), fresh), InMemoryRecordManager("ferries")
    options: Any = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "sha256"}
    first, other = document(3, "a"), document(4, "b")
    index([first, other], records, store, **options)
    before = inode(fresh, first)
    assert index([document(3, "a", page=2)], records, store, **options)["num_deleted"] == 1
    assert inode(fresh, first) == before
    # The same text from another source.
    index([document(3, "b")], records, store, **options)
    kept(fresh, first)
    index([document(5, "a")], records, store, **options)
    kept(fresh, first, document(5, "a"))


def test_asynchronous_indexing(fresh: FusedKVLLM) -> None:
    store, records = FusedKVVectorStore(InMemoryVectorStore(EMBEDDER), fresh), InMemoryRecordManager("ferries")
    options: Any = {"cleanup": "scoped_full", "source_id_key": "source", "key_encoder": "sha256"}
    first, second = document(3, "a"), document(4, "a")
    asyncio.run(aindex([first], records, store, **options))
    asyncio.run(aindex([second], records, store, **options))
    kept(fresh, second)


class _WithoutIds(InMemoryVectorStore):
    def get_by_ids(self, ids: Any, /) -> list[Document]:
        raise NotImplementedError


def test_a_store_that_does_not_find_documents_by_id(fresh: FusedKVLLM) -> None:
    store = FusedKVVectorStore(_WithoutIds(EMBEDDER), fresh)
    ids = store.add_documents([document(3, "a")])
    with pytest.warns(FusedKVWarning, match="_WithoutIds does not show the documents to be deleted"):
        store.delete(ids)
    kept(fresh, document(3, "a"))


def test_a_vector_store_is_needed_first(fresh: FusedKVLLM) -> None:
    with pytest.raises(ConfigError, match=r"FusedKVVectorStore\(vector_store, llm\)"):
        FusedKVVectorStore.from_texts(["a text"], EMBEDDER)


class TestConformance(VectorStoreIntegrationTests):
    """LangChain's own suite: the wrapper behaves as the store that it wraps."""

    @pytest.fixture
    def vectorstore(self, fresh: FusedKVLLM) -> VectorStore:  # type: ignore[override]
        return FusedKVVectorStore(InMemoryVectorStore(self.get_embeddings()), fresh)
