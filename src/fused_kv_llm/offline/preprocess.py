"""The second pass of ingestion: what similar chunks before a chunk change in its KV, stored beside it.

FusionRAG's offline stage (section 3.1, equation 10) prefills a chunk once more, after the KV of the chunks most
similar to it. Here that is done after several contexts of similar chunks, and what they change on average is kept in a
sidecar (:mod:`fused_kv_llm.context_shift`). Or it is done as published: once, after all of them, and the KV is kept to
be used in place of the chunk's own (:mod:`fused_kv_llm.store.replacement`). The chunk's own KV stays as it is, so a
chunk can be used before this pass, and the pass can stop anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.context_shift import context_shift, shift_name
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import LoadedModel, ModelOwner, PrefixKV, StoppedError
from fused_kv_llm.prompt import Segment
from fused_kv_llm.store import KVStore, replacement_name, replacement_tensors

from .batches import PendingChunk
from .context_prefill import BETWEEN_CHUNKS, ContextPrefill
from .corpus import CorpusPlanner
from .neighbour_graph import NeighbourGraph, Similarity
from .neighbours import GivenNeighbours, given_neighbours
from .shift_fitting import ShiftFitting
from .variant_builder import PromptChunks
from .writer import BackgroundWriter

__all__ = ["CONTEXT_CHUNKS", "PreprocessingPlan", "Preprocessor"]

CONTEXT_CHUNKS = 3
"""Neighbours that stand before a chunk at a time, where what they change is averaged."""

_CHUNKS_TO_WRITE = 8


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
    """

    chunks: list[PendingChunk] = field(default_factory=list)
    refreshed: set[str] = field(default_factory=set)
    stale: int = 0
    neighbours: dict[str, tuple[str, ...]] = field(default_factory=dict)
    token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Preprocessor:
    """Computes and stores what similar chunks change in stored ones; one thread at a time.

    Parameters
    ----------
    loaded : LoadedModel
    store : KVStore
    prefix : PrefixKV
        What stands before every chunk.
    planner : CorpusPlanner
        Knows the corpus.
    similarity : Similarity
        How similar chunks are found.
    owner : ModelOwner
        Computes the batches, between those of requests.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        store: KVStore,
        prefix: PrefixKV,
        planner: CorpusPlanner,
        similarity: Similarity,
        owner: ModelOwner,
    ) -> None:
        self._loaded = loaded
        self._store = store
        self._prefix = prefix
        self._planner = planner
        self._graph = NeighbourGraph(planner.identity, similarity)
        self._owner = owner
        self._replaces = similarity.replaces
        self._name = replacement_name(similarity.count) if self._replaces else shift_name(similarity.count)
        self._context_chunks = similarity.count if self._replaces else CONTEXT_CHUNKS
        self._met: set[str] = set()
        self._unstored: dict[str, tuple[int, ...]] = {}
        name = f"shift-map-{planner.identity[:16]}-{similarity.count}.safetensors"
        self._fitting = ShiftFitting(loaded, owner, prefix, planner, store.kv_dir / name)

    @property
    def storage(self) -> str:
        """Dtype in which what preprocessing makes is stored."""
        stored = self._dtype if self._store.kv_dtype == "auto" else self._store.kv_dtype
        return stored if self._replaces else "int8"

    def prepare(self, chunks: Sequence[PendingChunk], neighbours: GivenNeighbours | None) -> None:
        """Take note of chunks that are being ingested, and of a caller's neighbours of them.

        Raises
        ------
        ConfigError
            If the caller's graph answers with something other than texts.
        MissingExtraError
            If the embedder has to be asked and what it needs is not installed.
        """
        self._met.update(chunk.key for chunk in chunks)
        if neighbours is None:
            self._graph.check_installed()
            return
        found = given_neighbours([chunk.text for chunk in chunks], neighbours)
        known = {chunk.text: chunk for chunk in chunks}
        others = {text: known.get(text) or self._planner.chunk(text) for texts in found.values() for text in texts}
        # A neighbour that is not stored itself can be prefilled as long as this process knows its ids.
        stored = self._store.contains([other.key for other in others.values()]) | {chunk.key for chunk in chunks}
        self._unstored.update({o.key: o.token_ids for o in others.values() if o.key not in stored})
        self._graph.give({chunk.key: [others[text].key for text in found[chunk.text]] for chunk in chunks})

    def lacking(self) -> int:
        """Return how many stored chunks are not preprocessed, without asking who their neighbours are."""
        keys = self._store.sidecars.lacking(self._planner.identity, self._name)
        alone = len(keys) == 1 == len(self._planner.catalog.keys())
        return 0 if alone else sum(self._graph.may_have_neighbours(key) for key in keys)

    def plan(self, stopped: Callable[[], bool], *, refresh: bool) -> PreprocessingPlan:
        """Compare chunks that are new with the others, and return what has to be done.

        Parameters
        ----------
        stopped : callable
            Asked before every small batch of texts is embedded.
        refresh : bool
            Whether chunks whose neighbours have changed are preprocessed again.

        Raises
        ------
        MissingExtraError
            If faiss or the embedder's packages are not installed.
        StoppedError
            If it was stopped, or chunks were deleted meanwhile; it can be called again.
        """
        self._graph.update(
            self._planner.catalog.keys(), self._texts_of, lambda: self._owner.run(lambda: None, stopped=stopped)
        )
        lacking = set(self._store.sidecars.lacking(self._planner.identity, self._name))
        met, self._met = self._met, set()
        lacking |= {key for key in met - lacking if not self._store.sidecars.has(key, self._name)}
        stale = self._graph.stale() - lacking
        plan = PreprocessingPlan(refreshed=stale if refresh else set(), stale=0 if refresh else len(stale))
        plan.neighbours = near = {key: self._graph.neighbours(key) for key in sorted(lacking | plan.refreshed)}
        rows = self._store.rows({*near, *(other for others in near.values() for other in others)})
        plan.token_ids = {**self._unstored, **{key: row.token_ids for key, row in rows.items()}}
        for key, others in near.items():
            contexts = self._contexts(key, others, plan.token_ids) if key in rows else ()
            if contexts:
                plan.chunks.append(PendingChunk(key, rows[key].text, rows[key].token_ids, contexts))
        return plan

    def run(
        self, plan: PreprocessingPlan, written: Callable[[PendingChunk, int], None], stopped: Callable[[], bool]
    ) -> int:
        """Preprocess chunks, in small batches that give way to requests.

        Parameters
        ----------
        plan : PreprocessingPlan
        written : callable
            Called with every chunk whose sidecar is stored, and the bytes of its file.
        stopped : callable
            Asked before every forward; what was computed until then is kept.

        Returns
        -------
        int
            Tokens of similar chunks that had to be prefilled, since their KV is not stored exactly.

        Raises
        ------
        StoreError
            What a write met.
        StoppedError
            If it was stopped.
        """
        # FusionRAG's equation 10 has none between chunks.
        separator = () if self._replaces else self._planner.chunk(BETWEEN_CHUNKS).token_ids
        prefill = ContextPrefill(
            self._loaded, self._store, self._prefix, self._owner, plan.token_ids, stopped, separator
        )

        def write(item: tuple[PendingChunk, ChunkKV, list[ChunkKV]]) -> None:
            chunk, before, after = item
            nbytes = self._write(chunk.key, self._side(before, after))
            if nbytes is not None:
                self._graph.preprocessed(chunk.key, plan.neighbours[chunk.key])
                written(chunk, nbytes)

        # The next batch is computed while what a chunk's contexts change is compressed and written.
        writer = BackgroundWriter(write, _CHUNKS_TO_WRITE)
        try:
            if not self._replaces:
                self._fitting.prepare(plan.chunks, plan.token_ids, prefill)
            for computed in prefill.behind(plan.chunks):
                writer.submit(computed)
        finally:
            # What has been computed is written, also after a stop, so the next run goes on from there.
            writer.close()
        return prefill.neighbour_tokens

    def prompts(self, plan: PreprocessingPlan, contexts: int) -> Iterator[PromptChunks]:
        """Yield every chunk of a plan behind its first contexts, as prompts that leave variants.

        Parameters
        ----------
        plan : PreprocessingPlan
        contexts : int
            How many of each chunk's.
        """
        for chunk in plan.chunks:
            for context in chunk.contexts[:contexts]:
                ids, segments = list(self._prefix.token_ids), list[Segment]()
                for key in (*context, chunk.key):
                    start = len(ids)
                    ids += plan.token_ids[key]
                    segments.append(Segment(start, len(ids), key))
                yield PromptChunks(tuple(ids), tuple(segments))

    def close(self) -> None:
        """Close the file of neighbours."""
        self._graph.close()

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
            room, fitting = self._planner.max_tokens - len(token_ids[key]), list[str]()
            for other in known[begin : begin + self._context_chunks]:
                room -= len(token_ids[other])
                if room <= 0:
                    break
                fitting.append(other)
            if fitting:
                contexts.append(tuple(fitting))
        return tuple(contexts)

    def _side(self, before: ChunkKV, after: Sequence[ChunkKV]) -> dict[str, Tensor]:
        """Return a chunk's sidecar: what its neighbours change in it, or its KV behind them."""
        with torch.inference_mode():
            if self._replaces:
                return dict(replacement_tensors(after[0], self.storage))
            return context_shift(*self._fitting.shift(before, after))

    @property
    def _dtype(self) -> str:
        return str(self._loaded.dtype).removeprefix("torch.")

    def _write(self, key: str, side: dict[str, Tensor]) -> int | None:
        try:
            return self._store.sidecars.put(key, self._name, side, by_rows=True)
        except ConfigError:
            if self._store.contains([key]):
                raise
            # It was deleted, or evicted by another process that needed its room.
            return None
