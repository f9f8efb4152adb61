"""Storing the KV of an index's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import BaseNode

from fused_kv_llm.adapter import FusedKVModel
from fused_kv_llm.offline import GivenNeighbours, Preprocess
from fused_kv_llm.report import IngestReport
from llama_index_fused_kv.index_vectors import keep_vectors_of
from llama_index_fused_kv.nodes import nodes_of, texts_of

__all__ = ["build_kv_cache"]


def build_kv_cache(
    source: Any,
    llm: FusedKVModel,
    *,
    nodes: Sequence[BaseNode] | None = None,
    neighbours: GivenNeighbours | None = None,
    preprocess: Preprocess = "background",
    refresh: bool = False,
    prune: bool = False,
    progress: bool = True,
) -> IngestReport:
    """Prefill the nodes of an existing index once and store their KV.

    Parameters
    ----------
    source : BaseIndex, vector store, document store, retriever or iterable of BaseNode
        Any index, also one that ``load_index_from_storage`` returned; a store or a retriever; or the nodes themselves.
    llm : FusedKVLLM
        The LLM that will answer; LangChain's ``FusedKVLLM`` and ``ChatFusedKV`` serve as well.
    nodes : sequence of BaseNode or None
        For indexes whose vector store does not return its nodes.
    neighbours : mapping, callable or None
        Text to similar or linked texts, nearest first; None compares their vectors, which the LLM's embedder makes
        unless the index has them from it.
    preprocess : {"background", "wait", "later"}
        When chunks are preprocessed: in the background, before this call returns, or not yet. They can be asked about
        before.
    refresh : bool
        Whether chunks whose neighbours have changed are preprocessed again.
    prune : bool
        Whether stored chunks that are not among the nodes lose their KV: for a store of one corpus only.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    IngestReport

    Raises
    ------
    CorpusError
        If the source has no nodes that can be read.
    StoreFullError
        If the disk cannot hold the result.

    Notes
    -----
    Metadata is not stored: LlamaIndex puts it in front of each node's text, and it is computed with the prompt.
    """
    found = list(nodes_of(source) if nodes is None else nodes)
    keep_vectors_of(source, found, llm)
    texts = texts_of(found)
    return llm.build_kv_cache(
        texts, neighbours=neighbours, preprocess=preprocess, refresh=refresh, prune=prune, progress=progress
    )
