"""Planning the second pass of ingestion: which chunks lack it, and what stands before each; no model is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.context_shift import shift_name
from fused_kv_llm.model import StoppedError
from fused_kv_llm.store import KVStore, replacement_name

from .batches import PendingChunk
from .neighbour_graph import NeighbourGraph, Similarity

__all__ = ["CONTEXT_CHUNKS", "PreprocessingPlan", "PreprocessingPlanner"]

CONTEXT_CHUNKS = 3
"""Neighbours that stand before a chunk as a variant of it."""


@dataclass(slots=True)
class PreprocessingPlan:
    """What the second pass has to do.

    Parameters
    ----------
    chunks : list of PendingChunk
        Chunks to preprocess, with their contexts.
    refreshed : set of str
        Keys of those among them that were preprocessed after other neighbours.
    stale : int
        Chunks that were preprocessed after other neighbours and stay as they are.
    neighbours : dict of str to tuple of str
        Keys of the neighbours of every chunk, also of those that do not fit before it.
    token_ids : dict of str to tuple of int
        Stand-alone ids of the chunks and of their neighbours, by key.
    is_batch : bool
        Whether the chunks are computed together, in their order; otherwise they are divided into batches.
    """

    chunks: list[PendingChunk] = field(default_factory=list)
    refreshed: set[str] = field(default_factory=set)
    stale: int = 0
    neighbours: dict[str, tuple[str, ...]] = field(default_factory=dict)
    token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    is_batch: bool = False


class PreprocessingPlanner:
    """Says what the second pass has to do for the chunks of one identity; one thread at a time.

    Parameters
    ----------
    store : KVStore
    catalog : ChunkCatalog
        What is stored.
    identity : str
    max_tokens : int
        Tokens that fit behind the header.
    similarity : Similarity
        How similar chunks are found.

    Attributes
    ----------
    name : str
        Of the sidecars that the pass makes.
    graph : NeighbourGraph
    met : set of str
        Keys of chunks that were ingested since the last plan.
    unstored : dict of str to tuple of int
        Ids of neighbours that are not stored themselves, by key.
    """

    def __init__(
        self,
        store: KVStore,
        catalog: ChunkCatalog,
        identity: str,
        max_tokens: int,
        similarity: Similarity,
    ) -> None:
        self._store, self._catalog, self._identity, self._max_tokens = store, catalog, identity, max_tokens
        self.graph = NeighbourGraph(identity, similarity)
        count = similarity.count
        self.name = replacement_name(count) if similarity.replaces else shift_name(count, similarity.prompts)
        self._context_chunks = similarity.count if similarity.replaces else CONTEXT_CHUNKS
        self.met: set[str] = set()
        self.unstored: dict[str, tuple[int, ...]] = {}

    def lacking(self) -> int:
        """Return how many stored chunks are not preprocessed, without asking who their neighbours are."""
        keys = self._store.sidecars.lacking(self._identity, self.name)
        alone = len(keys) == 1 == len(self._catalog.keys())
        return 0 if alone else sum(self.graph.may_have_neighbours(key) for key in keys)

    def plan(self, wait: Callable[[], None] = lambda: None, *, refresh: bool) -> PreprocessingPlan:
        """Compare chunks that are new with the others, and return what has to be done.

        Parameters
        ----------
        wait : callable
            Called before every small batch of texts is embedded; may wait, or raise to give up.
        refresh : bool
            Whether chunks whose neighbours have changed are preprocessed again.

        Raises
        ------
        MissingExtraError
            If faiss or the embedder's packages are not installed.
        StoppedError
            If chunks were deleted meanwhile; it can be called again.
        """
        self.graph.update(self._catalog.keys(), self._texts_of, wait)
        lacking = set(self._store.sidecars.lacking(self._identity, self.name))
        met, self.met = self.met, set()
        lacking |= {key for key in met - lacking if not self._store.sidecars.has(key, self.name)}
        stale = self.graph.stale() - lacking
        plan = PreprocessingPlan(refreshed=stale if refresh else set(), stale=0 if refresh else len(stale))
        plan.neighbours = near = {key: self.graph.neighbours(key) for key in sorted(lacking | plan.refreshed)}
        rows = self._store.rows({*near, *(other for others in near.values() for other in others)})
        plan.token_ids = {**self.unstored, **{key: row.token_ids for key, row in rows.items()}}
        for key, others in near.items():
            contexts = self._contexts(key, others, plan.token_ids) if key in rows else ()
            if contexts:
                plan.chunks.append(PendingChunk(key, rows[key].text, rows[key].token_ids, contexts))
        return plan

    def _texts_of(self, keys: Sequence[str]) -> dict[str, str]:
        rows = self._store.rows(keys)
        if len(rows) < len(keys):
            # Some were deleted since they were listed, so it is planned again without them.
            raise StoppedError
        return {key: row.text for key, row in rows.items()}

    def _contexts(
        self, key: str, nearest: Sequence[str], token_ids: Mapping[str, tuple[int, ...]]
    ) -> tuple[tuple[str, ...], ...]:
        """Return contexts of so many neighbours as stand together and fit before the chunk, the nearest one first.

        That order measured closer to full prefill than the nearest one last.
        """
        contexts = []
        known = [other for other in nearest if other in token_ids]
        for begin in range(0, len(known), self._context_chunks):
            room, fitting = self._max_tokens - len(token_ids[key]), list[str]()
            for other in known[begin : begin + self._context_chunks]:
                if len(token_ids[other]) < room:
                    room -= len(token_ids[other])
                    fitting.append(other)
            if fitting:
                contexts.append(tuple(fitting))
        return tuple(contexts)
