"""The vectors that a LangChain vector store has of its documents."""

from __future__ import annotations

from typing import Any

from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore

from fused_kv_llm.adapter import IndexVectors, faiss_vectors
from fused_kv_llm.errors import CorpusError

__all__ = ["vectors_of"]

_INSIDE_RETRIEVERS = ("vectorstore", "base_retriever", "retriever")


def vectors_of(source: Any) -> IndexVectors:
    """Return texts with their vectors.

    Parameters
    ----------
    source : VectorStore or BaseRetriever
        FAISS, an ``InMemoryVectorStore``, Chroma or a store whose ``get`` gives embeddings out; one that is wrapped, or
        a retriever of one.

    Raises
    ------
    CorpusError
        If it gives no vectors out.
    """
    if isinstance(source, VectorStore):
        inner = getattr(source, "vector_store", None)
        return vectors_of(inner) if isinstance(inner, VectorStore) else _of_store(source)
    # The vectors of a retriever with a document store are those of smaller pieces.
    if isinstance(source, BaseRetriever) and getattr(source, "docstore", None) is None:
        for name in _INSIDE_RETRIEVERS:
            if (inner := getattr(source, name, None)) is not None:
                return vectors_of(inner)
    raise _refusal(source, "it is no vector store, nor a retriever of one")


def _of_store(store: Any) -> IndexVectors:
    ids = getattr(store, "index_to_docstore_id", None)
    if isinstance(ids, dict):  # FAISS
        vectors = faiss_vectors(store.index)
        return {store.docstore.search(id_).page_content: vectors[row] for row, id_ in ids.items()}
    entries = getattr(store, "store", None)
    if isinstance(entries, dict):  # InMemoryVectorStore
        return {entry["text"]: entry["vector"] for entry in entries.values()}
    get = getattr(store, "get", None)
    if not callable(get):
        raise _refusal(store, "it has no method 'get'")
    try:  # Chroma, and those that took over its method
        found = get(include=["documents", "embeddings"])
        return dict(zip(found["documents"], found["embeddings"], strict=True))
    except (TypeError, KeyError, ValueError, NotImplementedError) as error:
        raise _refusal(store, str(error)) from error


def _refusal(source: Any, reason: str) -> CorpusError:
    return CorpusError(
        f"neighbours='index': {type(source).__name__} gives no vectors out ({reason}); leave neighbours out to have "
        "the chunks embedded"
    )
