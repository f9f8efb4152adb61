"""Prefilling groups of similar chunks as prompts, to see what a prompt changes in a chunk's KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.context_shift import place_weight
from fused_kv_llm.model import LoadedModel, ModelOwner, PackedChunk, PrefixKV, prefill_packed
from fused_kv_llm.prompt import Segment

from .batches import PendingChunk
from .corpus import CorpusPlanner
from .preprocessing_plan import PreprocessingPlan
from .shift_prompts import (
    BEFORE_CHUNKS,
    BETWEEN_CHUNKS,
    chunks_again,
    group_tokens,
    prompt_of_group,
    similar_groups,
)
from .true_kv import true_kv
from .variant_builder import PromptChunks

__all__ = ["SeenKV", "ShiftPrefill"]

SeenKV = list[tuple[ChunkKV, float]]
"""A chunk's KV at places of a prompt, moved to where its plain KV is, and the weight of each place."""


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
        Tokens of chunks that were computed before a small group only.
    """

    def __init__(self, loaded: LoadedModel, prefix: PrefixKV, owner: ModelOwner, planner: CorpusPlanner) -> None:
        self._loaded, self._prefix, self._owner = loaded, prefix, owner
        self._max_tokens = planner.max_tokens
        self._group_tokens = group_tokens(planner.max_tokens, loaded.geometry.kv_bytes_per_token(loaded.dtype))
        self._separator = planner.chunk(BETWEEN_CHUNKS).token_ids
        self._instruction = planner.chunk(BEFORE_CHUNKS).token_ids
        self.neighbour_tokens = 0

    def run(self, plan: PreprocessingPlan, stopped: Callable[[], bool]) -> Iterator[list[tuple[PendingChunk, SeenKV]]]:
        """Yield the chunks of a plan as they are in the prompt of their group, group by group.

        Parameters
        ----------
        plan : PreprocessingPlan
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
            seen = {} if prompt is None else self._seen(prompt, len(group), stopped)
            yield [(chunk, seen[chunk.key]) for chunk in group if chunk.key in seen]

    def _seen(self, prompt: PromptChunks, group_chunks: int, stopped: Callable[[], bool]) -> dict[str, SeenKV]:
        """Return the KV of the last chunks of a prompt, in it and behind the others, with the weights of its places."""
        before, places = prompt.segments[:-group_chunks], prompt.segments[-group_chunks:]
        self.neighbour_tokens += sum(place.num_tokens for place in before)
        home, again = len(self._prefix.token_ids), places[: chunks_again(prompt, group_chunks)]
        # With the separator behind the last chunk. A group that stands behind neighbours needs none of its chunks here.
        others = [Segment(places[len(again)].start, len(prompt.ids))] if again else []
        found = true_kv(self._loaded, self._owner, prompt.ids, [*places, *others], home, stopped)
        seen: dict[str, SeenKV] = {
            str(place.key): [(kv, place_weight(place.start - home, place.num_tokens))]
            for place, kv in zip(places, found, strict=False)
        }
        for place in again:
            kv = self._behind(found[-1], found[places.index(place)].token_ids, stopped)
            seen[str(place.key)].append((kv, place_weight(others[0].num_tokens, place.num_tokens)))
        return seen

    def _behind(self, others: ChunkKV, token_ids: tuple[int, ...], stopped: Callable[[], bool]) -> ChunkKV:
        """Compute a chunk behind the KV that others have in a prompt; each is a forward, as its pieces are."""

        def compute() -> ChunkKV:
            self._loaded.check_unchanged()
            return prefill_packed(self._loaded, [PackedChunk(token_ids, (others,))], self._prefix)[0]

        return self._owner.run(compute, len(token_ids), stopped)
