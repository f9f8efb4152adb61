"""The second pass of ingestion: what similar chunks before a chunk change in its KV, stored beside it.

FusionRAG's offline stage (section 3.1, equation 10) prefills a chunk once more, after the KV of the chunks most
similar to it. Here chunks that are similar to each other are prefilled as prompts, and what these change in
each is kept in a sidecar (:mod:`fused_kv_llm.context_shift`). Or it is done as published: the KV behind a chunk's
neighbours is kept to be used in place of its own (:mod:`fused_kv_llm.store.replacement`). The chunk's own KV stays as
it is, so a chunk can be used before this pass, and the pass can stop anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.context_shift import ShiftFit
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import EightBitLinears, LoadedModel, ModelOwner, PrefixKV, eight_bit_of
from fused_kv_llm.prompt import Segment
from fused_kv_llm.selectors import is_of_shift
from fused_kv_llm.store import KVStore, replacement_tensors

from .batches import PendingChunk
from .context_prefill import ContextPrefill
from .corpus import CorpusPlanner
from .first_passes import AfterFirstPasses, first_passes_of
from .fixed_pieces import FixedPieces
from .neighbour_graph import Similarity
from .neighbours import GivenNeighbours, given_neighbours
from .preprocessing_plan import PreprocessingPlan, PreprocessingPlanner
from .prompt_prefill import PromptPrefill
from .shift_prefill import ShiftPrefill
from .variant_builder import PromptChunks
from .writer import BackgroundWriter

__all__ = ["Preprocessor"]

_SHIFTS_TO_WRITE, _REPLACEMENTS_TO_WRITE = 8, 2
"""Chunks whose sidecars may wait to be written; what replaces KV is up to four times as large as a shift."""

WORTH_EIGHT_BITS_TOKENS = 8192
"""Tokens of a pass for which the model's weights are rounded: that takes a fraction of the time that it saves then."""


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
        Computes the batches, between those of requests and when no first pass is under way.

    Attributes
    ----------
    replaces : bool
        Whether what it makes is used in place of chunks' own KV.
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
        self._owner = owner
        self._times = similarity.prompts
        self.replaces = similarity.replaces
        self._plans = PreprocessingPlanner(store, planner.catalog, planner.identity, planner.max_tokens, similarity)

    @property
    def storage(self) -> str:
        """Dtype in which what preprocessing makes is stored."""
        stored = self._dtype if self._store.kv_dtype == "auto" else self._store.kv_dtype
        return stored if self.replaces else "int8"

    def prepare(self, chunks: Sequence[PendingChunk], neighbours: GivenNeighbours | None) -> None:
        """Take note of chunks that are being ingested, and of a caller's neighbours of them.

        Raises
        ------
        ConfigError
            If the caller's graph answers with something other than texts.
        MissingExtraError
            If the embedder has to be asked and what it needs is not installed.
        """
        self._plans.met.update(chunk.key for chunk in chunks)
        if neighbours is None:
            self._plans.graph.check_installed()
            return
        found = given_neighbours([chunk.text for chunk in chunks], neighbours)
        known = {chunk.text: chunk for chunk in chunks}
        others = {text: known.get(text) or self._planner.chunk(text) for texts in found.values() for text in texts}
        # A neighbour that is not stored itself can be prefilled as long as this process knows its ids.
        stored = self._store.contains([other.key for other in others.values()]) | {chunk.key for chunk in chunks}
        self._plans.unstored.update({o.key: o.token_ids for o in others.values() if o.key not in stored})
        self._plans.graph.give({chunk.key: [others[text].key for text in found[chunk.text]] for chunk in chunks})

    def lacking(self) -> int:
        """Return how many stored chunks are not preprocessed, without asking who their neighbours are."""
        return self._plans.lacking()

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
        owner = self._after_first_passes(stopped)
        return self._plans.plan(lambda: owner.run(lambda: None, stopped=stopped), refresh=refresh)

    def run(
        self, plan: PreprocessingPlan, written: Callable[[PendingChunk, int], None], stopped: Callable[[], bool]
    ) -> int:
        """Preprocess chunks, in small pieces that give way to requests.

        Parameters
        ----------
        plan : PreprocessingPlan
        written : callable
            Called with every chunk whose sidecar is stored, and the bytes of its file.
        stopped : callable
            Asked before every forward; a group of similar chunks of which not all is computed is lost.

        Returns
        -------
        int
            Tokens of similar chunks that had to be computed beside those of the plan.

        Raises
        ------
        StoreError
            What a write met.
        StoppedError
            If it was stopped.
        """
        owner = self._after_first_passes(stopped)
        prefill = ContextPrefill(self._loaded, self._store, self._prefix, owner, plan.token_ids, stopped)

        def write(item: tuple[PendingChunk, dict[str, Tensor]]) -> None:
            chunk, side = item
            nbytes = self._write(chunk.key, side)
            if nbytes is not None:
                self._plans.graph.preprocessed(chunk.key, plan.neighbours[chunk.key])
                written(chunk, nbytes)

        # The next batch is computed while what was computed is written.
        writer = BackgroundWriter(write, _REPLACEMENTS_TO_WRITE if self.replaces else _SHIFTS_TO_WRITE)
        try:
            if self.replaces:
                for chunk, kv in prefill.behind(plan.chunks, is_batch=plan.is_batch):
                    writer.submit((chunk, self._replacement(kv)))
                return prefill.neighbour_tokens
            shifts = self.shift_prefill(plan, owner, stopped)
            for group in shifts.run(plan, prefill.plain, stopped):
                for chunk, fit in group:
                    writer.submit((chunk, _shift(fit)))
                # It is let go before the next one is computed.
                del group
            return shifts.neighbour_tokens
        finally:
            # What has been computed is written, also after a stop, so the next run goes on from there.
            writer.close()

    def shift_prefill(self, plan: PreprocessingPlan, owner: ModelOwner, stopped: Callable[[], bool]) -> ShiftPrefill:
        """Return what computes the prompts of a plan; raises as :meth:`run`.

        Parameters
        ----------
        plan : PreprocessingPlan
        owner : ModelOwner
            Computes the pieces.
        stopped : callable
            Asked before every forward that is needed first.
        """
        prefill = PromptPrefill(self._loaded, owner, self._linears(plan, owner, stopped))
        return ShiftPrefill(self._loaded, self._prefix, self._planner, self._times, prefill)

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
        self._plans.graph.close()

    def _linears(
        self, plan: PreprocessingPlan, owner: ModelOwner, stopped: Callable[[], bool]
    ) -> EightBitLinears | None:
        """Return what computes linear layers faster than the model, where that is worth making."""
        tokens = self._times * sum(len(chunk.token_ids) for chunk in plan.chunks)
        # Who fixes the pieces wants the same bytes again, on machines without eight bits too.
        if tokens < WORTH_EIGHT_BITS_TOKENS or isinstance(self._owner, FixedPieces):
            return None
        return eight_bit_of(self._loaded, owner, stopped)

    def _after_first_passes(self, stopped: Callable[[], bool]) -> ModelOwner:
        return AfterFirstPasses(self._owner, first_passes_of(self._loaded.model), stopped)

    def _replacement(self, kv: ChunkKV) -> dict[str, Tensor]:
        with torch.inference_mode():
            return dict(replacement_tensors(kv, self.storage))

    @property
    def _dtype(self) -> str:
        return str(self._loaded.dtype).removeprefix("torch.")

    def _write(self, key: str, side: dict[str, Tensor]) -> int | None:
        sidecars = self._store.sidecars
        # Before what they were made of, so that nothing that stops this leaves them behind.
        for name in sidecars.names(key):
            if is_of_shift(name):
                sidecars.remove(key, name)
        try:
            return sidecars.put(key, self._plans.name, side, by_rows=True)
        except ConfigError:
            if self._store.contains([key]):
                raise
            # It was deleted, or evicted by another process that needed its room.
            return None


def _shift(fit: ShiftFit) -> dict[str, Tensor]:
    with torch.inference_mode():
        return fit.compressed()
