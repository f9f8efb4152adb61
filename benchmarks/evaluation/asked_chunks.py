"""The second pass for a sample of questions: of a whole corpus, only the prompts that show a chunk that is asked about.

Neighbours and groups are those of the whole corpus, so every asked chunk gets the context shift that ingesting the
whole corpus would give it, for a fraction of the time. The default preprocessing only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rich.progress import track

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.context_shift import ShiftFit, context_shift, place_weight
from fused_kv_llm.offline import as_embedder
from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.corpus import CorpusPlanner
from fused_kv_llm.offline.grouping import group_tokens, similar_groups
from fused_kv_llm.offline.neighbour_index import NeighbourIndex
from fused_kv_llm.offline.shift_prompts import BEFORE_CHUNKS, BETWEEN_CHUNKS, PromptShape, prompts_of_group
from fused_kv_llm.offline.true_kv import true_kv
from fused_kv_llm.offline.variant_builder import PromptChunks

__all__ = ["preprocess_asked"]


def preprocess_asked(engine: FusedKVEngine, corpus: Sequence[str], asked: Collection[str]) -> int:
    """Store the context shifts of the asked chunks that have none yet; their plain KV is stored already.

    Parameters
    ----------
    engine : FusedKVEngine
        With the default preprocessing.
    corpus : sequence of str
        All texts, the asked ones among them.
    asked : collection of str

    Returns
    -------
    int
        Prompts that were computed.
    """
    planned = _Planned.of(engine, corpus)
    name = engine._parts.shift_name
    keys = {planned.planner.chunk(text).key for text in asked}
    groups = [g for g in planned.groups(engine) if any(_lacks(engine, c.key, name) for c in g if c.key in keys)]
    computed = 0
    for group in track(groups, description="groups with asked chunks"):
        wanted = {chunk.key: chunk for chunk in group if chunk.key in keys}
        prompts = [p for p in planned.prompts(group, engine) if any(place.key in wanted for place in p.segments)]
        times = engine.config.preprocessing_prompts
        fits = {key: ShiftFit(*_plain(engine, chunk), times) for key, chunk in wanted.items()}
        for prompt in prompts:
            for key, kv, weight in _seen(engine, prompt, wanted):
                fits[key].add(kv.keys, kv.values, weight)
        for key, fit in fits.items():
            engine.store.sidecars.put(key, name, context_shift(*fit.shift()), by_rows=True)
        computed += len(prompts)
    return computed


@dataclass(frozen=True, slots=True)
class _Planned:
    """A corpus whose chunks know their neighbours."""

    planner: CorpusPlanner
    chunks: list[PendingChunk]

    @classmethod
    def of(cls, engine: FusedKVEngine, corpus: Sequence[str]) -> _Planned:
        parts = engine._parts
        room = parts.context_length - len(parts.prefix.token_ids)
        planner = CorpusPlanner(parts.catalog, parts.identity, parts.renderer.encode_chunk, room)
        chunks = {chunk.key: chunk for chunk in map(planner.chunk, corpus)}
        index, embedder = NeighbourIndex(engine.config.neighbours), as_embedder(engine.config.embedder)
        index.update(list(chunks), lambda keys: embedder.encode([chunks[key].text for key in keys]))
        return cls(planner, [PendingChunk(k, c.text, c.token_ids, (index.near(k).keys,)) for k, c in chunks.items()])

    def groups(self, engine: FusedKVEngine) -> list[list[PendingChunk]]:
        return similar_groups(self.chunks, _group_tokens(self.planner, engine), len(_words(self.planner)[1]))

    def prompts(self, group: Sequence[PendingChunk], engine: FusedKVEngine) -> list[PromptChunks]:
        before, between = _words(self.planner)
        shape = PromptShape(
            engine._parts.prefix.token_ids, before, between, self.planner.max_tokens,
            lead_tokens=_group_tokens(self.planner, engine), times=engine.config.preprocessing_prompts,
        )  # fmt: skip
        return prompts_of_group(group, {chunk.key: chunk.token_ids for chunk in self.chunks}, shape)


def _words(planner: CorpusPlanner) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return planner.chunk(BEFORE_CHUNKS).token_ids, planner.chunk(BETWEEN_CHUNKS).token_ids


def _group_tokens(planner: CorpusPlanner, engine: FusedKVEngine) -> int:
    return group_tokens(planner.max_tokens, engine.loaded.geometry.kv_bytes_per_token(engine.loaded.dtype))


def _lacks(engine: FusedKVEngine, key: str, name: str) -> bool:
    return not engine.store.sidecars.has(key, name)


def _plain(engine: FusedKVEngine, chunk: PendingChunk) -> tuple[object, object]:
    with engine.store.open(chunk.key, chunk.token_ids) as stored:
        return stored.read_layers(0, stored.num_layers)


def _seen(engine: FusedKVEngine, prompt: PromptChunks, wanted: Collection[str]) -> Iterator[tuple[str, ChunkKV, float]]:
    home = len(engine._parts.prefix.token_ids)
    places = [place for place in prompt.segments if place.key in wanted]
    ids = prompt.ids[: places[-1].stop]
    found = true_kv(engine.loaded, engine.corpus._owner, ids, places, home, lambda: False)
    for place, kv in zip(places, found, strict=True):
        yield place.key, kv, place_weight(place.start - home, place.num_tokens)
