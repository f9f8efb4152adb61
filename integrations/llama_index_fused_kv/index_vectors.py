"""The vectors that a LlamaIndex index has of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.indices.base import BaseIndex
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from fused_kv_llm.adapter import IndexVectors, faiss_vectors
from fused_kv_llm.errors import CorpusError
from llama_index_fused_kv.nodes import nodes_of, text_of

__all__ = ["vectors_of"]


def vectors_of(source: Any, nodes: Sequence[BaseNode] | None = None) -> IndexVectors:
    """Return texts with their vectors.

    Parameters
    ----------
    source : BaseIndex, vector store, retriever or iterable of BaseNode
        An index over LlamaIndex's own vector store or over FAISS; or nodes that carry their embeddings, as some
        vector stores return them.
    nodes : sequence of BaseNode or None
        For indexes whose vector store does not return its nodes.

    Raises
    ------
    CorpusError
        If no vector can be read.
    """
    index = source
    if isinstance(source, BaseRetriever):
        index = getattr(source, "_index", source)
    found = list(nodes_of(index) if nodes is None else nodes)
    by_id = _of_store(index)
    vectors = {}
    for node in found:
        vector = by_id.get(getattr(node, "node_id", None))
        vector = getattr(node, "embedding", None) if vector is None else vector
        if vector is not None:
            vectors[text_of(node)] = vector
    if not vectors:
        raise CorpusError(
            f"neighbours='index': {type(source).__name__} gives no vectors of its nodes out; leave neighbours out to "
            "have them embedded"
        )
    return vectors


def _of_store(index: Any) -> dict[Any, Any]:
    """Return vectors by the ids of nodes, as far as the vector store shows them."""
    store = index.vector_store if isinstance(index, BaseIndex) and hasattr(index, "vector_store") else index
    if not isinstance(store, BasePydanticVectorStore):
        return {}
    if isinstance(by_id := getattr(getattr(store, "data", None), "embedding_dict", None), dict):  # SimpleVectorStore
        return by_id
    faiss_index = getattr(store, "_faiss_index", None)
    if faiss_index is None or not isinstance(index, BaseIndex):
        return {}
    vectors = faiss_vectors(faiss_index)
    return {node_id: vectors[int(row)] for row, node_id in index.index_struct.nodes_dict.items()}
