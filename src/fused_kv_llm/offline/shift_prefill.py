"""Prefilling groups of similar chunks as prompts, to see what a prompt changes in a chunk's KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.context_shift import place_weight
from fused_kv_llm.model import LoadedModel, ModelOwner, PrefixKV
from fused_kv_llm.prompt import Segment

from .batches import PendingChunk
from .corpus import CorpusPlanner
from .grouping import group_tokens, similar_groups
from .preprocessing_plan import PreprocessingPlan
from .shift_prompts import AGAIN_CHUNKS, BEFORE_CHUNKS, BETWEEN_CHUNKS, prompt_of_group
from .true_kv import true_kv
from .variant_builder import PromptChunks

__all__ = ["SeenKV", "ShiftPrefill"]

SeenKV = tuple[ChunkKV, float]
"""A chunk's KV behind others, moved to where its plain KV is, and the weight of its place there."""

PlainKV = Callable[[Iterable[str]], dict[str, ChunkKV]]
Stopped = Callable[[], bool]


class ShiftPrefill:
    """Computes chunks as full prefill does in the prompt of their group, in pieces that give way to requests.

    Parameters
    ----------
    loaded : LoadedModel
    prefix : PrefixKV
        What stands before every prompt.
    owner : ModelOwner
        Computes the pieces, between those of requests.
    planner : CorpusPlanner

    Attributes
    ----------
    neighbour_tokens : int
        Tokens of chunks that had to be computed only because they stand before a small group. The first of them is not:
        it stands there as it is stored.
    """

    def __init__(self, loaded: LoadedModel, prefix: PrefixKV, owner: ModelOwner, planner: CorpusPlanner) -> None:
        self._loaded, self._prefix, self._owner = loaded, prefix, owner
        self._max_tokens = planner.max_tokens
        self._group_tokens = group_tokens(planner.max_tokens, loaded.geometry.kv_bytes_per_token(loaded.dtype))
        self._separator = planner.chunk(BETWEEN_CHUNKS).token_ids
        self._instruction = planner.chunk(BEFORE_CHUNKS).token_ids
        self.neighbour_tokens = 0

    def run(
        self, plan: PreprocessingPlan, plain: PlainKV, stopped: Stopped
    ) -> Iterator[list[tuple[PendingChunk, SeenKV]]]:
        """Yield the chunks of a plan as they are in the prompt of their group, group by group.

        Parameters
        ----------
        plan : PreprocessingPlan
        plain : callable
            Returns the KV of chunks right after the header, by key.
        stopped : callable
            Asked before every piece.

        Raises
        ------
        StoppedError
            If it was stopped; the group under way is computed again by the next run.
        """
        separator, most = self._separator, self._group_tokens
        for group in [plan.chunks] if plan.is_batch else similar_groups(plan.chunks, most, len(separator)):
            prompt = prompt_of_group(
                group, plan.token_ids, self._prefix.token_ids, self._instruction, separator, self._max_tokens, most
            )
            seen = {} if prompt is None else self._seen(prompt, len(group), plain, stopped)
            yield [(chunk, seen[chunk.key]) for chunk in group if chunk.key in seen]

    def _seen(self, prompt: PromptChunks, group_chunks: int, plain: PlainKV, stopped: Stopped) -> dict[str, SeenKV]:
        """Return the KV that the chunks of a group have behind those before them, its first ones behind the others."""
        first, lead = prompt.segments[0], len(prompt.segments) - group_chunks
        known = [(first.start, plain([str(first.key)])[str(first.key)])]
        if lead:
            self.neighbour_tokens += sum(place.num_tokens for place in prompt.segments[1:lead])
            return self._full(prompt.ids, prompt.segments[lead:], known, stopped)[0]
        again = prompt.segments[: min(AGAIN_CHUNKS, group_chunks - 1)]
        # With the separator behind the last chunk.
        others = Segment(prompt.segments[len(again)].start, len(prompt.ids))
        seen, kv = self._full(prompt.ids, [*prompt.segments[1:], others], known, stopped)
        ids = [*self._prefix.token_ids, *prompt.ids[others.start :]]
        known = [(len(self._prefix.token_ids), kv)]
        behind = list[Segment]()
        for place in again:
            behind.append(Segment(len(ids), len(ids) + place.num_tokens, place.key))
            ids += [*prompt.ids[place.start : place.stop], *self._separator]
        return seen | self._full(ids, behind, known, stopped)[0]

    def _full(
        self, ids: Sequence[int], places: Sequence[Segment], known: list[tuple[int, ChunkKV]], stopped: Stopped
    ) -> tuple[dict[str, SeenKV], ChunkKV]:
        """Return the KV of the chunks at some places of a prompt, by key, and that of the last place."""
        prefix, home = self._prefix, len(self._prefix.token_ids)
        header = (0, ChunkKV(prefix.keys, prefix.values, prefix.token_ids, 0))
        found = true_kv(self._loaded, self._owner, ids, places, home, stopped, [header, *known])
        seen = {
            place.key: (kv, place_weight(place.start - home, place.num_tokens))
            for place, kv in zip(places, found, strict=True)
            if place.key is not None
        }
        return seen, found[-1]
