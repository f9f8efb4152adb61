"""Prefilling groups of similar chunks as prompts, to see what chunks before a chunk change in its KV."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.context_shift import ShiftFit, place_weight
from fused_kv_llm.model import LoadedModel, PrefixKV
from fused_kv_llm.prompt import Segment

from .batches import PendingChunk
from .corpus import CorpusPlanner
from .grouping import group_tokens, similar_groups
from .preprocessing_plan import PreprocessingPlan
from .prompt_prefill import PromptPrefill
from .shift_prompts import BEFORE_CHUNKS, BETWEEN_CHUNKS, PromptShape, ShiftPrompt, prompts_of_group

__all__ = ["ShiftPrefill"]

PlainKV = Callable[[Iterable[str]], dict[str, ChunkKV]]
"""Keys to the KV of chunks with nothing before them but the header."""


class ShiftPrefill:
    """Computes chunks in prompts of their group, in pieces that give way to requests.

    Parameters
    ----------
    loaded : LoadedModel
    prefix : PrefixKV
        What stands before every prompt.
    planner : CorpusPlanner
    times : int
        Prompts that each chunk is put into.
    prefill : PromptPrefill
        Computes the prompts.

    Attributes
    ----------
    neighbour_tokens : int
        Tokens of chunks that were computed in prompts of a small group they are not part of.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prefix: PrefixKV,
        planner: CorpusPlanner,
        times: int,
        prefill: PromptPrefill,
    ) -> None:
        self._geometry, self._prefix, self._prefill = loaded.geometry, prefix, prefill
        self._group_tokens = group_tokens(planner.max_tokens, loaded.geometry.kv_bytes_per_token(loaded.dtype))
        before, between = (planner.chunk(words).token_ids for words in (BEFORE_CHUNKS, BETWEEN_CHUNKS))
        self._shape = PromptShape(
            prefix.token_ids, before, between, planner.max_tokens, lead_tokens=self._group_tokens, times=times
        )
        self.neighbour_tokens = 0

    def run(
        self,
        plan: PreprocessingPlan,
        plain: PlainKV,
        stopped: Callable[[], bool],
        wanted: Container[str] | None = None,
    ) -> Iterator[list[tuple[PendingChunk, ShiftFit]]]:
        """Yield the chunks of a plan with what the prompts of their group change in them, group by group.

        Parameters
        ----------
        plan : PreprocessingPlan
        plain : callable
            Keys of chunks to their plain KV.
        stopped : callable
            Asked before every piece.
        wanted : container of str or None
            Keys of the chunks to yield. Prompts on which none of them depends are not computed. None yields all.

        Raises
        ------
        StoppedError
            If it was stopped; the group under way is computed again by the next run.
        """
        for group in [plan.chunks] if plan.is_batch else self._groups(plan):
            asked = {chunk.key: chunk for chunk in group if wanted is None or chunk.key in wanted}
            prompts, fitted = _needed(prompts_of_group(group, plan.token_ids, self._shape), asked)
            if not prompts:
                continue
            before = plain([*fitted, *(str(prompt.segments[0].key) for prompt, _ in prompts)])
            fits = {key: ShiftFit(before[key].keys, before[key].values) for key in fitted}
            for prompt in prompts:
                self._add(prompt, fits, before, stopped)
            yield [(chunk, fits[key]) for key, chunk in asked.items()]

    def _groups(self, plan: PreprocessingPlan) -> list[list[PendingChunk]]:
        return similar_groups(plan.chunks, self._group_tokens, len(self._shape.separator))

    def _add(
        self,
        shift_prompt: ShiftPrompt,
        fits: Mapping[str, ShiftFit],
        plain: Mapping[str, ChunkKV],
        stopped: Callable[[], bool],
    ) -> None:
        """Add what a prompt changes in the chunks that it computes and that have a fit."""
        (prompt, known), home = shift_prompt, len(self._prefix.token_ids)
        computed = prompt.segments[known:]
        places = [place for place in computed if place.key in fits]
        self.neighbour_tokens += sum(place.num_tokens for place in computed if place.key not in fits)
        begin = self._known(prompt.segments[:known], fits, plain)
        found = self._prefill.true_kv(prompt.ids[: places[-1].stop], places, begin, stopped)
        for kv, place in zip(found, places, strict=True):
            tables = self._geometry.tables(torch.tensor([home - place.start]), kv.keys.device)
            fits[str(place.key)].add(kv.keys, kv.values, place_weight(place.start - home, place.num_tokens), tables)

    def _known(
        self, places: Sequence[Segment], fits: Mapping[str, ShiftFit], plain: Mapping[str, ChunkKV]
    ) -> Iterator[tuple[Segment, ChunkKV]]:
        """Yield the KV of the chunks that a prompt begins with: plain, behind the first with the shift found so far."""
        first, *others = places
        yield first, plain[str(first.key)]
        for place in others:
            weight = place_weight(place.start - len(self._prefix.token_ids), place.num_tokens)
            with torch.inference_mode():
                keys, values = fits[str(place.key)].applied(weight)
            yield place, replace(plain[str(place.key)], keys=keys, values=values)


def _needed(prompts: Sequence[ShiftPrompt], asked: Iterable[str]) -> tuple[list[ShiftPrompt], list[str]]:
    """Return the prompts that shifts of asked chunks depend on, and the keys of all chunks whose shifts they need.

    These are the asked chunks and those that such a prompt begins with, which have the shift of a prompt before it.
    """
    keys, needed = dict.fromkeys(asked), list[ShiftPrompt]()
    for one in reversed(prompts):
        places = [str(place.key) for place in one.prompt.segments]
        if not keys.keys().isdisjoint(places[one.known :]):
            needed.insert(0, one)
            keys |= dict.fromkeys(places[1 : one.known])
    return needed, list(keys)
