"""The documents of a loader, a vector store, a document store or a retriever."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.stores import BaseStore
from langchain_core.vectorstores import VectorStore

from fused_kv_llm.errors import CorpusError

__all__ = ["documents_of"]

# Where retrievers keep what they return, in this order: a parent retriever's document store holds the parents, its
# vector store only the children. Compressors are assumed to drop documents, not to rewrite them.
_INSIDE_RETRIEVERS = ("docstore", "vectorstore", "retrievers", "base_retriever", "retriever", "docs", "texts")
_GIVE_THEM = "pass the documents that were added: build_kv_cache(documents)"


def documents_of(source: Any) -> list[Any]:
    """Return the documents of a source.

    Parameters
    ----------
    source : iterable, BaseLoader, VectorStore, BaseStore or BaseRetriever
        Documents or strings; a loader; FAISS, Chroma, an ``InMemoryVectorStore`` or another vector store that can
        list its documents; a document store; a retriever around any of these.

    Returns
    -------
    list of Document or str
        What a chain would put into its prompt; for a ``ParentDocumentRetriever`` these are the parents.

    Raises
    ------
    CorpusError
        If the source cannot list its documents, or is of another kind.
    """
    if isinstance(source, (str, Document)):
        raise CorpusError(
            "build_kv_cache takes a list of LangChain documents or strings; put the single one into a list"
        )
    if isinstance(source, BaseLoader):
        return list(source.lazy_load())
    if isinstance(source, VectorStore):
        return _of_vector_store(source)
    if isinstance(source, BaseRetriever):
        return _of_retriever(source)
    if isinstance(source, BaseStore):
        return [found for found in source.mget(list(source.yield_keys())) if found is not None]
    if isinstance(source, Iterable):
        return list(source)
    raise CorpusError(f"Cannot take documents out of a {type(source).__name__}: {_GIVE_THEM}")


def _of_vector_store(store: Any) -> list[Any]:
    inner = getattr(store, "vector_store", None)
    if isinstance(inner, VectorStore):
        return _of_vector_store(inner)
    ids = getattr(store, "index_to_docstore_id", None)
    if isinstance(ids, dict):  # FAISS
        return [store.docstore.search(id_) for id_ in ids.values()]
    entries = getattr(store, "store", None)
    if isinstance(entries, dict):  # InMemoryVectorStore
        return [Document(entry["text"], metadata=entry["metadata"]) for entry in entries.values()]
    kind = type(store).__name__
    get = getattr(store, "get", None)
    if not callable(get):
        raise CorpusError(f"{kind} does not give its documents out: {_GIVE_THEM}")
    try:  # Chroma, and those that took over its method
        texts = get(include=["documents"])["documents"]
    except (TypeError, KeyError, ValueError, NotImplementedError) as error:
        raise CorpusError(f"{kind} does not give its documents out ({error}): {_GIVE_THEM}") from error
    return list(texts)


def _of_retriever(retriever: BaseRetriever) -> list[Any]:
    for name in _INSIDE_RETRIEVERS:
        inner = getattr(retriever, name, None)
        if inner is None:
            continue
        if name == "retrievers":
            return [document for one in inner for document in documents_of(one)]
        return documents_of(inner)
    raise CorpusError(f"{type(retriever).__name__} does not show where it keeps its documents: {_GIVE_THEM}")
