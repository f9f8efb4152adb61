"""Storing the KV of an index's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import BaseNode

from fused_kv_llm.adapter import FusedKVModel, Neighbours, given_by
from fused_kv_llm.offline import Preprocess
from fused_kv_llm.report import IngestReport
from llama_index_fused_kv.index_vectors import vectors_of
from llama_index_fused_kv.nodes import nodes_of, texts_of

__all__ = ["build_kv_cache"]


def build_kv_cache(
    source: Any,
    llm: FusedKVModel,
    *,
    nodes: Sequence[BaseNode] | None = None,
    neighbours: Neighbours | None = None,
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
    neighbours : mapping, callable, "index" or None
        Text to similar or linked texts, nearest first; None asks the embedder. ``"index"`` takes the vectors that the
        index has of its nodes already: nothing is embedded again.
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
        If the source has no nodes, or no vectors, that can be read.
    StoreFullError
        If the disk cannot hold the result.

    Notes
    -----
    Metadata is not stored: LlamaIndex puts it in front of each node's text, and it is computed with the prompt.
    """
    found = nodes_of(source) if nodes is None else nodes
    texts = texts_of(found)
    given = given_by(neighbours, lambda: vectors_of(source, found), texts, llm.engine)
    return llm.build_kv_cache(
        texts, neighbours=given, preprocess=preprocess, refresh=refresh, prune=prune, progress=progress
    )
