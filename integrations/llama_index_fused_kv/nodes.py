"""The texts of nodes, and the nodes of an index, a store or a retriever."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.indices.base import BaseIndex
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import BaseNode, Document, ImageNode, MetadataMode, NodeWithScore
from llama_index.core.storage.docstore.types import BaseDocumentStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from fused_kv_llm.chunk import chunk_text
from fused_kv_llm.errors import CorpusError

if TYPE_CHECKING:
    from fused_kv_llm.adapter import FusedKVModel

__all__ = ["announce_nodes", "nodes_of", "text_of", "texts_of"]

_GIVE_THEM = "Pass the nodes that were indexed: build_kv_cache(index, llm, nodes=nodes)."


def nodes_of(source: Any) -> list[Any]:
    """Return the nodes of a source.

    Parameters
    ----------
    source : BaseIndex, vector store, document store, retriever or iterable
        Iterables may hold nodes, scored nodes and strings.

    Raises
    ------
    CorpusError
        If the source does not return its nodes, or is of another kind.
    """
    if isinstance(source, (str, BaseNode, NodeWithScore)):
        raise CorpusError("build_kv_cache takes a list of nodes, documents or strings; put the single one into a list")
    if isinstance(source, BaseIndex):
        return _of_index(source)
    if isinstance(source, BasePydanticVectorStore):
        return _of_vector_store(source, [])
    if isinstance(source, BaseDocumentStore):
        return _without_whole_documents(source)
    if isinstance(source, BaseRetriever):
        return _of_retriever(source)
    if isinstance(source, Iterable):
        return list(source)
    raise CorpusError(f"Cannot take nodes out of a {type(source).__name__}. {_GIVE_THEM}")


def _of_index(index: BaseIndex[Any]) -> list[BaseNode]:
    stored = _without_whole_documents(index.docstore)
    vector_store = getattr(index, "vector_store", None)
    if vector_store is not None and vector_store.stores_text:
        return _of_vector_store(vector_store, stored)
    if not stored:
        raise CorpusError("The index has no nodes: insert documents first, or pass nodes=[...].")
    return stored


def _of_vector_store(vector_store: Any, otherwise: list[BaseNode]) -> list[BaseNode]:
    kind = type(vector_store).__name__
    try:
        found: list[BaseNode] = list(vector_store.get_nodes())
    except Exception as error:  # third-party stores refuse in ways of their own
        if otherwise:
            return otherwise
        raise CorpusError(
            f"The text is kept in {kind}, which does not give its nodes out ({type(error).__name__}: {error}). "
            f"{_GIVE_THEM}"
        ) from error
    if not found and not otherwise:
        raise CorpusError(f"{kind} returned no nodes: insert documents first, or pass nodes=[...].")
    return found or otherwise


def _without_whole_documents(docstore: BaseDocumentStore) -> list[BaseNode]:
    """Return the nodes without the documents they were made of, which a pipeline stores as well."""
    return [node for node in docstore.docs.values() if not isinstance(node, Document)]


def _of_retriever(retriever: BaseRetriever) -> list[Any]:
    if several := getattr(retriever, "_retrievers", None):
        return [node for one in several for node in nodes_of(one)]
    # An auto-merging retriever returns parents too, which are in the document store only.
    context = getattr(retriever, "_storage_context", None)
    if context is not None:
        return nodes_of(context.docstore)
    for name in ("_index", "_retriever"):
        inner = getattr(retriever, name, None)
        if inner is not None:
            return nodes_of(inner)
    raise CorpusError(f"{type(retriever).__name__} does not show where it keeps its nodes. {_GIVE_THEM}")


def text_of(item: BaseNode | NodeWithScore | str) -> str:
    """Return a node's text as it stands in prompts after the metadata.

    Raises
    ------
    CorpusError
        If it is no node.
    """
    if isinstance(item, str):
        return item
    node = item.node if isinstance(item, NodeWithScore) else item
    if not isinstance(node, BaseNode):
        raise CorpusError(f"Cannot ingest a {type(item).__name__}: give nodes, documents or strings")
    return node.get_content(metadata_mode=MetadataMode.NONE)


def texts_of(nodes: Iterable[BaseNode | NodeWithScore | str]) -> list[str]:
    """Return the texts of those nodes that have one."""
    texts = [text_of(item) for item in nodes if not _is_bare_image(item)]
    return [text for text in texts if chunk_text(text)]


def announce_nodes(llm: FusedKVModel, nodes: Sequence[NodeWithScore]) -> None:
    """Have the KV of retrieved nodes loaded, and their texts expected in the next prompt, with their scores."""
    found = [node for node in nodes if texts_of([node])]
    texts = texts_of(found)
    llm.prefetch(texts)
    llm.announce_retrieval(texts, [node.score for node in found])


def _is_bare_image(item: Any) -> bool:
    return isinstance(item, ImageNode) and not item.text
