"""The vectors that a LangChain vector store has of its documents, and what made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from fused_kv_llm.adapter import IndexVectors, faiss_vectors

__all__ = ["store_of", "vectors_of"]

_INSIDE_RETRIEVERS = ("vectorstore", "base_retriever", "retriever")


def store_of(source: Any) -> VectorStore | None:
    """Return the vector store that a source is, wraps or searches; None for other sources.

    A retriever with a document store has none: its vectors are those of smaller pieces.
    """
    if isinstance(source, VectorStore):
        return store_of(getattr(source, "vector_store", None)) or source
    if isinstance(source, BaseRetriever) and getattr(source, "docstore", None) is None:
        inner = (getattr(source, name, None) for name in _INSIDE_RETRIEVERS)
        return next((found for one in inner if (found := store_of(one)) is not None), None)
    return None


def vectors_of(store: Any, ids: Sequence[str] | None = None) -> IndexVectors:
    """Return texts with their vectors, as far as a vector store gives them out.

    Parameters
    ----------
    store : VectorStore
        FAISS, an ``InMemoryVectorStore``, Chroma or a store whose ``get`` gives embeddings out as Chroma's does.
    ids : sequence of str or None
        Of the documents that were added last, if only these are wanted.
    """
    by_row = getattr(store, "index_to_docstore_id", None)
    if isinstance(by_row, dict):  # FAISS, which appends
        rows = range(0 if ids is None else max(0, len(by_row) - len(ids)), len(by_row))
        if (vectors := faiss_vectors(store.index, rows)) is None:
            return {}
        return {
            store.docstore.search(by_row[row]).page_content: vector for row, vector in zip(rows, vectors, strict=True)
        }
    if isinstance(store, InMemoryVectorStore):
        entries = store.store.values() if ids is None else [store.store[id_] for id_ in ids]
        return {entry["text"]: entry["vector"] for entry in entries}
    some = {} if ids is None else {"ids": list(ids)}
    try:  # Chroma, and those that took over its method
        found = store.get(include=["documents", "embeddings"], **some)
        return dict(zip(found["documents"], found["embeddings"], strict=True))
    except Exception:  # third-party stores refuse in ways of their own; then the embedder is asked
        return {}
