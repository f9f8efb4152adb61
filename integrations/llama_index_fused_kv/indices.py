"""A vector store index that keeps the KV of its nodes up to date."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters

from fused_kv_llm.adapter import FusedKVModel, in_thread
from fused_kv_llm.chunk import chunk_text, chunk_texts
from fused_kv_llm.errors import CorpusError, FusedKVWarning
from fused_kv_llm.offline import GivenNeighbours, Preprocess
from fused_kv_llm.report import IngestReport
from llama_index_fused_kv.index_vectors import keep_vectors_of
from llama_index_fused_kv.ingestion import build_kv_cache
from llama_index_fused_kv.nodes import nodes_of, texts_of

__all__ = ["FusedKVIndex"]


class FusedKVIndex(VectorStoreIndex):
    """A ``VectorStoreIndex`` with precomputed KV for its nodes.

    After :meth:`build_kv_cache`, KV follows the index: inserted nodes are prefilled, deleted ones lose their KV unless
    another node has the same text, and refreshed documents get new KV for what changed. ``load_index_from_storage``
    returns a plain ``VectorStoreIndex``; use the function :func:`llama_index_fused_kv.build_kv_cache` for it.

    Examples
    --------
    >>> import tempfile
    >>> from llama_index.core import Document
    >>> from fused_kv_llm.demo.llama_embedder import MiniLMEmbedding
    >>> from llama_index_fused_kv import FusedKVIndex, FusedKVLLM
    >>> llm = FusedKVLLM(model="smollm2-135m", kv_dir=tempfile.mkdtemp())
    >>> first = Document(text="The harbour office at Skeldra opens at six in the morning. " * 3)
    >>> index = FusedKVIndex.from_documents([first], embed_model=MiniLMEmbedding())
    >>> index.build_kv_cache(llm, progress=False).chunks_new
    1
    >>> index.insert(Document(text="The harbour office at Ulvane opens at eight in the morning. " * 3))
    >>> index.delete_ref_doc(first.doc_id, delete_from_docstore=True)
    >>> llm.engine.store.stats().chunks
    1
    """

    _kv_llm: FusedKVModel | None = None

    def build_kv_cache(
        self,
        llm: FusedKVModel,
        *,
        nodes: Sequence[BaseNode] | None = None,
        neighbours: GivenNeighbours | None = None,
        preprocess: Preprocess = "background",
        refresh: bool = False,
        prune: bool = False,
        progress: bool = True,
    ) -> IngestReport:
        """Prefill all nodes once, and keep their KV up to date from now on.

        Parameters
        ----------
        llm : FusedKVLLM
        nodes, neighbours, preprocess, refresh, prune, progress
            See :func:`llama_index_fused_kv.build_kv_cache`.

        Returns
        -------
        IngestReport

        Raises
        ------
        CorpusError
            If the index has no nodes that can be read.
        StoreFullError
            If the disk cannot hold the result.
        """
        report = build_kv_cache(
            self,
            llm,
            nodes=nodes,
            neighbours=neighbours,
            preprocess=preprocess,
            refresh=refresh,
            prune=prune,
            progress=progress,
        )
        self._kv_llm = llm
        return report

    def insert_nodes(self, nodes: Sequence[BaseNode], **insert_kwargs: Any) -> None:
        """Insert nodes and prefill them; preprocessing follows in the background."""
        super().insert_nodes(nodes, **insert_kwargs)
        self._ingest(nodes)

    async def ainsert_nodes(self, nodes: Sequence[BaseNode], **insert_kwargs: Any) -> None:
        """Insert nodes and prefill them, in a thread."""
        await super().ainsert_nodes(nodes, **insert_kwargs)
        await in_thread(self._ingest, nodes)

    def delete_nodes(self, node_ids: list[str], delete_from_docstore: bool = False, **delete_kwargs: Any) -> None:
        """Delete nodes and their KV."""
        leaving = self._leaving(node_ids=node_ids)
        super().delete_nodes(node_ids, delete_from_docstore, **delete_kwargs)
        self._forget(leaving)

    async def adelete_nodes(
        self, node_ids: list[str], delete_from_docstore: bool = False, **delete_kwargs: Any
    ) -> None:
        """Delete nodes and their KV."""
        leaving = await in_thread(self._leaving, node_ids=node_ids)
        await super().adelete_nodes(node_ids, delete_from_docstore, **delete_kwargs)
        await in_thread(self._forget, leaving)

    def delete_ref_doc(self, ref_doc_id: str, delete_from_docstore: bool = False, **delete_kwargs: Any) -> None:
        """Delete a document's nodes and their KV."""
        leaving = self._leaving(ref_doc_id=ref_doc_id)
        super().delete_ref_doc(ref_doc_id, delete_from_docstore, **delete_kwargs)
        self._forget(leaving)

    async def adelete_ref_doc(self, ref_doc_id: str, delete_from_docstore: bool = False, **delete_kwargs: Any) -> None:
        """Delete a document's nodes and their KV."""
        leaving = await in_thread(self._leaving, ref_doc_id=ref_doc_id)
        await super().adelete_ref_doc(ref_doc_id, delete_from_docstore, **delete_kwargs)
        await in_thread(self._forget, leaving)

    def _ingest(self, nodes: Sequence[BaseNode]) -> None:
        texts = texts_of(nodes)
        if self._kv_llm is not None and texts:
            keep_vectors_of(self, nodes, self._kv_llm)
            self._kv_llm.engine.build_kv_cache(texts, progress=False)

    def _leaving(self, *, node_ids: Sequence[str] = (), ref_doc_id: str | None = None) -> list[BaseNode]:
        """Return the nodes that are about to be deleted, as far as the stores can list them."""
        if self._kv_llm is None:
            return []
        if ref_doc_id is not None:
            info = self.docstore.get_ref_doc_info(ref_doc_id)
            node_ids = info.node_ids if info is not None else ()
        found = list(self.docstore.get_nodes(list(node_ids), raise_error=False)) if node_ids else []
        if found or not self._vector_store.stores_text:
            return found
        try:
            if ref_doc_id is None:
                return list(self._vector_store.get_nodes(list(node_ids)))
            by_document = MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value=ref_doc_id)])
            return list(self._vector_store.get_nodes(filters=by_document))
        except Exception as error:  # third-party stores refuse in ways of their own
            warnings.warn(
                f"{type(self._vector_store).__name__} does not show the nodes to be deleted "
                f"({type(error).__name__}), so their KV stays in the store: delete it with "
                "llm.delete_kv_cache(nodes).",
                FusedKVWarning,
                stacklevel=3,
            )
            return []

    def _forget(self, leaving: Sequence[BaseNode]) -> None:
        if self._kv_llm is None or not leaving:
            return
        gone = {node.node_id for node in leaving}
        try:
            kept = set(chunk_texts(texts_of(node for node in nodes_of(self) if node.node_id not in gone)))
        except CorpusError:
            kept = set()
        self._kv_llm.engine.delete_chunks(text for text in texts_of(leaving) if chunk_text(text) not in kept)
