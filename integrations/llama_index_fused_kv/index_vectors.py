"""The vectors that a LlamaIndex index has of its nodes, and what made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.retrievers import BaseRetriever

from fused_kv_llm.adapter import FusedKVModel, IndexVectors, faiss_vectors, keep_index_vectors
from llama_index_fused_kv.nodes import text_of, texts_of

__all__ = ["keep_vectors_of", "vectors_of"]


def keep_vectors_of(source: Any, nodes: Sequence[Any], llm: FusedKVModel) -> None:
    """Remember the vectors that an index, or that of a retriever, has of nodes which are about to be ingested.

    See :func:`fused_kv_llm.adapter.keep_index_vectors`.
    """
    index = getattr(source, "_index", None) if isinstance(source, BaseRetriever) else source
    if isinstance(index, VectorStoreIndex):
        keep_index_vectors(llm.engine, texts_of(nodes), index._embed_model, lambda: vectors_of(index, nodes))


def vectors_of(index: VectorStoreIndex, nodes: Sequence[Any]) -> IndexVectors:
    """Return the texts of nodes with their vectors, as far as an index gives them out.

    Parameters
    ----------
    index : VectorStoreIndex
        Over LlamaIndex's own vector store, or over FAISS.
    nodes : sequence of BaseNode
        Of the index; where they carry their embeddings, these are taken.
    """
    by_id = _by_id(index, {getattr(node, "node_id", "") for node in nodes})
    vectors = {}
    for node in nodes:
        vector = by_id.get(getattr(node, "node_id", ""))
        vectors[text_of(node)] = getattr(node, "embedding", None) if vector is None else vector
    return vectors


def _by_id(index: VectorStoreIndex, wanted: set[str]) -> dict[str, Any]:
    store: Any = index.vector_store
    by_id = getattr(getattr(store, "data", None), "embedding_dict", None)
    if isinstance(by_id, dict):  # SimpleVectorStore
        return by_id
    faiss_index = getattr(store, "_faiss_index", None)
    if faiss_index is None:
        return {}
    rows = {node_id: int(row) for row, node_id in index.index_struct.nodes_dict.items() if node_id in wanted}
    vectors = faiss_vectors(faiss_index, list(rows.values()))
    return {} if vectors is None else dict(zip(rows, vectors, strict=True))
