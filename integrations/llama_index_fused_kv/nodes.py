"""The texts of nodes, and the nodes of an index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, Document, ImageNode, MetadataMode, NodeWithScore

from fused_kv_llm.errors import CorpusError
from fused_kv_llm.report import IngestReport

if TYPE_CHECKING:
    from fused_kv_llm.adapter import FusedKVModel

__all__ = ["build_kv_cache", "nodes_of", "text_of", "texts_of"]


def build_kv_cache(
    index: BaseIndex[Any] | Sequence[BaseNode],
    llm: FusedKVModel,
    *,
    nodes: Sequence[BaseNode] | None = None,
    progress: bool = True,
) -> IngestReport:
    """Prefill the nodes of an existing index once and store their KV.

    Parameters
    ----------
    index : BaseIndex or sequence of BaseNode
        Any index, also one that ``load_index_from_storage`` returned; or the nodes themselves.
    llm : FusedKVLLM
        The LLM that will answer; LangChain's ``FusedKVLLM`` and ``ChatFusedKV`` serve as well.
    nodes : sequence of BaseNode or None
        For indexes whose vector store keeps the nodes to itself.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    IngestReport

    Raises
    ------
    CorpusError
        If the index has no nodes that can be read.
    StoreFullError
        If the disk cannot hold the result.

    Notes
    -----
    Metadata is not part of it: LlamaIndex prints it before each node's text, and it is computed with the prompt.
    """
    if nodes is None:
        nodes = nodes_of(index) if isinstance(index, BaseIndex) else list(index)
    return llm.engine.build_kv_cache(texts_of(nodes), progress=progress)


def nodes_of(index: BaseIndex[Any]) -> list[BaseNode]:
    """Return an index's nodes, from its document store or its vector store.

    Raises
    ------
    CorpusError
        If neither gives them out.
    """
    stored = [node for node in index.docstore.docs.values() if not isinstance(node, Document)]
    vector_store = getattr(index, "vector_store", None)
    if vector_store is None or not vector_store.stores_text:
        if stored:
            return stored
        raise CorpusError("The index has no nodes: insert documents first, or pass nodes=[...].")
    kind = type(vector_store).__name__
    try:
        found: list[BaseNode] = list(vector_store.get_nodes())
    except Exception as error:  # third-party stores refuse in ways of their own
        if stored:
            return stored
        raise CorpusError(
            f"The index keeps its text in {kind}, which does not give its nodes out ({type(error).__name__}: {error}). "
            "Pass the nodes that were indexed: build_kv_cache(index, llm, nodes=nodes)."
        ) from error
    if not found and not stored:
        raise CorpusError(f"{kind} returned no nodes: insert documents first, or pass nodes=[...].")
    return found or stored


def text_of(item: BaseNode | NodeWithScore) -> str:
    """Return a node's text as it stands in prompts after the metadata."""
    node = item.node if isinstance(item, NodeWithScore) else item
    return node.get_content(metadata_mode=MetadataMode.NONE)


def texts_of(nodes: Iterable[BaseNode | NodeWithScore]) -> list[str]:
    """Return the texts of those nodes that have one."""
    texts = [text_of(item) for item in nodes if not _is_bare_image(item)]
    return [text for text in texts if text.strip()]


def _is_bare_image(item: Any) -> bool:
    return isinstance(item, ImageNode) and not item.text
