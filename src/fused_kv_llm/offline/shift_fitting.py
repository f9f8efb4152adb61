"""The shift map of a model and a corpus: read where it was fitted before, fitted where there are enough chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.context_shift import mean_shift, place_weight
from fused_kv_llm.model import LoadedModel, ModelOwner, PrefixKV

from .batches import PendingChunk
from .context_prefill import BETWEEN_CHUNKS, ContextPrefill
from .corpus import CorpusPlanner
from .shift_map import ShiftLesson, ShiftLessons, ShiftMap, fit_shift_map, read_shift_map
from .shift_prompts import prompts_of_chunks
from .true_kv import true_kv
from .variant_builder import PromptChunks

__all__ = ["ShiftFitting", "shift_map_name"]


def shift_map_name(identity: str, num_neighbours: int) -> str:
    """Return the name of the file of a map.

    Parameters
    ----------
    identity : str
        ``KVIdentity.digest``.
    num_neighbours : int
    """
    return f"shift-map-{identity[:16]}-{num_neighbours}.safetensors"


@dataclass(slots=True)
class _BegunFit:
    """What was learned until a fit was stopped, so that the next one goes on from there."""

    prompts: list[PromptChunks]
    known: ShiftLessons = field(default_factory=ShiftLessons)
    done: int = 0


class ShiftFitting:
    """Corrects context shifts by a map, which is kept beside the store; one thread at a time.

    Parameters
    ----------
    loaded : LoadedModel
    owner : ModelOwner
        Computes the prompts, in pieces between those of requests.
    prefix : PrefixKV
        What stands before every chunk.
    planner : CorpusPlanner
    path : Path
        The map's file.
    """

    def __init__(
        self, loaded: LoadedModel, owner: ModelOwner, prefix: PrefixKV, planner: CorpusPlanner, path: Path
    ) -> None:
        self._loaded, self._owner, self._prefix, self._planner = loaded, owner, prefix, planner
        self._path = path
        self._map: ShiftMap | None = None
        self._is_settled = False
        self._begun: _BegunFit | None = None

    def prepare(
        self, chunks: Sequence[PendingChunk], token_ids: Mapping[str, tuple[int, ...]], prefill: ContextPrefill
    ) -> None:
        """Read the map, or fit it on prompts of these chunks if they are enough; otherwise shifts stay as they are.

        Raises
        ------
        OSError
            If its file cannot be written.
        StoppedError
            If `prefill` was stopped.
        """
        if self._is_settled or not chunks or not self._loaded.geometry.attends_cache:
            return
        self._map = read_shift_map(self._path, prefill.plain(chunks[0].key))
        if self._map is not None:
            self._is_settled = True
            return
        by_key = {chunk.key: chunk for chunk in chunks}
        separator = self._planner.chunk(BETWEEN_CHUNKS).token_ids
        prompts = self._begun.prompts if self._begun is not None else []
        if not prompts or not all(prompt.keys <= by_key.keys() for prompt in prompts):
            prompts = prompts_of_chunks(chunks, token_ids, self._prefix.token_ids, separator, self._planner.max_tokens)
        if prompts:
            found = self.fit(prompts, by_key, prefill)
            found.write(self._path)
            self.settle(found)

    def fit(
        self, prompts: Sequence[PromptChunks], chunks: Mapping[str, PendingChunk], prefill: ContextPrefill
    ) -> ShiftMap:
        """Return the map that is fitted to prompts; raises as :meth:`prepare`.

        Parameters
        ----------
        prompts : sequence of PromptChunks
            At least two.
        chunks : mapping of str to PendingChunk
            Those that stand in them, with their contexts, by key.
        prefill : ContextPrefill
        """
        if self._begun is None or self._begun.prompts != list(prompts):
            self._begun = _BegunFit(list(prompts))
        begun = self._begun
        for prompt in begun.prompts[begun.done : -1]:
            begun.known += self._lessons(prompt, chunks, prefill)
            begun.done += 1
        found = fit_shift_map(begun.known, self._lessons(begun.prompts[-1], chunks, prefill))
        self._begun = None
        return found

    def settle(self, shift_map: ShiftMap | None) -> None:
        """Use this map, or none, from now on: nothing is read or fitted any more."""
        self._map, self._is_settled = shift_map, True

    def shift(self, before: ChunkKV, after: Sequence[ChunkKV]) -> tuple[Tensor, Tensor]:
        """Return a chunk's shift, float32 keys and values ``[L, Hkv, T, D]``, corrected if there is a map.

        Parameters
        ----------
        before : ChunkKV
            Its plain KV.
        after : sequence of ChunkKV
            That behind each of its contexts.
        """
        shift = _plain_shift(before, after)
        return shift if self._map is None else self._map.correct(before, shift, self._loaded.geometry)

    def _lessons(
        self, prompt: PromptChunks, pending: Mapping[str, PendingChunk], prefill: ContextPrefill
    ) -> ShiftLessons:
        """Compare the shifts of a prompt's chunks with what full prefill makes of them there."""
        home = len(self._prefix.token_ids)
        places = {str(segment.key): segment for segment in prompt.segments}
        full = true_kv(self._loaded, self._owner, prompt.ids, prompt.segments, home, prefill.stopped)
        true = dict(zip(places, full, strict=True))
        lessons = ShiftLessons()
        for chunk, before, after in prefill.behind([pending[key] for key in places]):
            weight = place_weight(places[chunk.key].start - home, len(chunk.token_ids))
            with torch.inference_mode():
                lesson = ShiftLesson(before, _plain_shift(before, after), true[chunk.key], weight)
                lessons.add(lesson, self._loaded.geometry)
        return lessons


def _plain_shift(before: ChunkKV, after: Sequence[ChunkKV]) -> tuple[Tensor, Tensor]:
    return mean_shift((before.keys, before.values), [(kv.keys, kv.values) for kv in after])
