"""The shift map: fitted by least squares, the same at every position, left out where it does not help."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_kernels import rerotate_keys
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model import Geometry, LoadedModel, StoppedError, load_model
from fused_kv_llm.offline import shift_prompts
from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.shift_fitting import ShiftFitting
from fused_kv_llm.offline.shift_map import (
    FIRST_TOKENS,
    ShiftLesson,
    ShiftLessons,
    ShiftMap,
    fit_shift_map,
    read_shift_map,
)
from fused_kv_llm.offline.shift_prompts import LEAST_CHUNKS, prompts_of_chunks
from fused_kv_llm.offline.true_kv import true_kv
from fused_kv_llm.offline.variant_builder import PromptChunks
from fused_kv_llm.prompt import Segment
from fused_kv_llm.serving import loop_of

Shift = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(tiny_model(), tokenizer=smollm2_tokenizer())


def drawn(geometry: Geometry, tokens: int, position: int = 3) -> tuple[ChunkKV, Shift]:
    heads, key_dim, value_dim = geometry.room
    shape = geometry.num_layers, heads, tokens
    keys, values = torch.randn(*shape, key_dim), torch.randn(*shape, value_dim)
    plain = ChunkKV(keys, values, tuple(range(tokens)), position)
    return plain, (0.3 * torch.randn(*shape, key_dim), 0.3 * torch.randn(*shape, value_dim))


def random_map(geometry: Geometry, size: float) -> ShiftMap:
    heads, key_dim, value_dim = geometry.room
    width = key_dim + value_dim
    return ShiftMap(size * torch.randn(geometry.num_layers, heads, 2 * width + FIRST_TOKENS + 1, width))


def lesson(geometry: Geometry, tokens: int, taught: ShiftMap, weight: float = 0.7) -> ShiftLessons:
    """Chunks whose true KV is as the map says."""
    chunks = []
    for position in (3, 5):
        plain, shift = drawn(geometry, tokens, position)
        keys, values = taught.correct(plain, shift, geometry)
        true = ChunkKV(plain.keys + weight * keys, plain.values + weight * values, plain.token_ids, position)
        chunks.append(ShiftLesson(plain, shift, true, weight))
    lessons = ShiftLessons()
    for chunk in chunks:
        lessons.add(chunk, geometry)
    return lessons


def test_a_linear_change_is_learned(loaded: LoadedModel) -> None:
    torch.manual_seed(0)
    geometry = loaded.geometry
    taught = random_map(geometry, 0.2)
    found = fit_shift_map(lesson(geometry, 30_000, taught), lesson(geometry, 2_000, taught))
    plain, shift = drawn(geometry, 50)
    for mine, right, before in zip(
        found.correct(plain, shift, geometry), taught.correct(plain, shift, geometry), shift, strict=True
    ):
        assert (mine - right).norm() < 0.1 * (before - right).norm()


def test_each_of_the_first_tokens_is_learned_from(loaded: LoadedModel) -> None:
    torch.manual_seed(4)
    taught = random_map(loaded.geometry, 0.2)
    known, last = (lesson(loaded.geometry, 30, taught) for _ in range(2))
    found = fit_shift_map(known, last)
    of_first = found.weights[..., -FIRST_TOKENS - 1 : -1, :].abs().amax((0, 1, 3))
    assert of_first.shape == (FIRST_TOKENS,)
    assert of_first.min() > 0
    assert known.num_tokens == 2 * (4 + 13), "and from every second one of the others"


def test_a_fit_that_was_stopped_goes_on_where_it_was(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    geometry, taught = loaded.geometry, random_map(loaded.geometry, 0.2)
    prompts = [PromptChunks((number,), ()) for number in range(4)]
    lessons = {prompt.ids: lesson(geometry, 200, taught) for prompt in prompts}
    asked: list[tuple[int, ...]] = []

    def learned(self: ShiftFitting, prompt: PromptChunks, *_: object) -> ShiftLessons:
        asked.append(prompt.ids)
        if len(asked) == 3:
            raise StoppedError
        return lessons[prompt.ids]

    monkeypatch.setattr(ShiftFitting, "_lessons", learned)
    none = cast(Any, None)
    fitting, other = (ShiftFitting(loaded, none, none, none, tmp_path / "map") for _ in range(2))
    with pytest.raises(StoppedError):
        fitting.fit(prompts, {}, none)
    found = fitting.fit(prompts, {}, none)
    assert asked == [(0,), (1,), (2,), (2,), (3,)]
    assert torch.equal(found.weights, other.fit(prompts, {}, none).weights)


def test_what_does_not_help_with_the_last_prompt_is_left_out(loaded: LoadedModel) -> None:
    torch.manual_seed(1)
    geometry = loaded.geometry
    one, other = random_map(geometry, 0.2), random_map(geometry, 0.2)
    # Half of the layers are taught the opposite by the last prompt.
    other.weights[0] = one.weights[0]
    other.weights[1:] = -one.weights[1:]
    found = fit_shift_map(lesson(geometry, 4_000, one), lesson(geometry, 1_000, other))
    assert found.weights[0].abs().max() > 0
    assert not found.weights[1:].any()


def test_a_chunk_is_corrected_alike_at_every_position(loaded: LoadedModel) -> None:
    torch.manual_seed(2)
    geometry, mapping = loaded.geometry, random_map(loaded.geometry, 0.2)
    plain, shift = drawn(geometry, 9, position=4)
    tables = geometry.tables(torch.tensor([40]))

    def moved(keys: torch.Tensor) -> torch.Tensor:
        return torch.stack([rerotate_keys(layer, table) for layer, table in zip(keys, tables, strict=True)])

    there = ChunkKV(moved(plain.keys), plain.values, plain.token_ids, 44)
    keys, values = mapping.correct(plain, shift, geometry)
    keys_there, values_there = mapping.correct(there, (moved(shift[0]), shift[1]), geometry)
    torch.testing.assert_close(moved(keys), keys_there, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values, values_there, rtol=1e-3, atol=1e-3)


def test_a_map_is_read_again_and_nothing_else_is(loaded: LoadedModel, tmp_path: Path) -> None:
    mapping, path = random_map(loaded.geometry, 0.2), tmp_path / "map.safetensors"
    plain, _ = drawn(loaded.geometry, 5)
    assert read_shift_map(path, plain) is None
    mapping.write(path)
    found = read_shift_map(path, plain)
    assert found is not None
    assert torch.equal(found.weights, mapping.weights)
    other = ChunkKV(plain.keys[:1], plain.values[:1], plain.token_ids, 3)
    assert read_shift_map(path, other) is None, "it is another model's"
    path.write_bytes(path.read_bytes()[:-9])
    assert read_shift_map(path, plain) is None


def test_prompts_are_made_of_neighbours_and_fit_the_context() -> None:
    keys = [f"{number:03}" for number in range(2 * LEAST_CHUNKS)]
    ids = {key: tuple([int(key)] * 20) for key in keys}
    near = {key: tuple(keys[(int(key) + step) % len(keys)] for step in (1, 2, 3)) for key in keys}
    chunks = [PendingChunk(key, key, ids[key], (near[key],)) for key in keys]
    assert prompts_of_chunks(chunks[: LEAST_CHUNKS - 1], ids, (7,), (8, 9), 10_000) == []
    prompts = prompts_of_chunks(chunks, ids, (7,), (8, 9), 10_000)
    assert len(prompts) == 2 * LEAST_CHUNKS // 25
    used = [segment.key for prompt in prompts for segment in prompt.segments]
    assert len(used) == len(set(used)), "a chunk teaches once"
    for prompt in prompts:
        assert prompt.ids[0] == 7
        assert len(prompt.segments) == 10
        for segment in prompt.segments:
            assert prompt.ids[segment.start : segment.stop] == ids[str(segment.key)]
            assert prompt.ids[segment.stop : segment.stop + 2] == (8, 9)
    alone = [PendingChunk(key, key, ids[key], (("elsewhere",),)) for key in keys]
    for prompt in prompts_of_chunks(alone, ids, (7,), (8, 9), 10_000):
        assert len(prompt.segments) == 10, "neighbours that are not preprocessed now teach nothing"
    for prompt in prompts_of_chunks(chunks, ids, (7,), (8, 9), 50):
        assert len(prompt.segments) == 2, "a third chunk does not fit"
    assert prompts_of_chunks(chunks, ids, (7,), (8, 9), 30) == [], "a chunk alone teaches nothing"


def test_as_many_prompts_as_chunks_pay_for() -> None:
    keys = [f"{number:03}" for number in range(500)]
    ids = dict.fromkeys(keys, (1, 2))
    chunks = [PendingChunk(key, key, ids[key]) for key in keys]
    for count, prompts in ((64, 2), (100, 4), (500, 16)):
        assert len(prompts_of_chunks(chunks[:count], ids, (7,), (8,), 10_000)) == prompts


@pytest.mark.parametrize("pieces", [True, False], ids=["two pieces", "one piece"])
def test_true_kv_is_what_the_model_computes(loaded: LoadedModel, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr("fused_kv_llm.offline.true_kv._PIECE_TOKENS", 7)
    ids, home = list(range(20, 34)), 2
    segments = [Segment(2, 6, "one"), Segment(8, 13, "two")]
    found = true_kv(loaded, loop_of(loaded.model), ids, segments, home, lambda: False)
    with torch.inference_mode():
        layers = loaded.model(torch.tensor([ids]), use_cache=True).past_key_values.layers
    for kv, segment in zip(found, segments, strict=True):
        tables = loaded.geometry.tables(torch.tensor([segment.start - home]))
        assert kv.token_ids == tuple(ids[segment.start : segment.stop])
        for number, layer in enumerate(layers):
            place = slice(segment.start, segment.stop)
            torch.testing.assert_close(
                rerotate_keys(kv.keys[number], tables[number]), layer.keys[0, :, place], rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(kv.values[number], layer.values[0, :, place], rtol=1e-4, atol=1e-4)


@pytest.mark.real_model
def test_stored_kv_comes_closer_to_full_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts that the fit has not seen."""
    loaded = load_model("smollm2-135m", dtype="float32")
    texts = SHORT
    asked = texts[1::7][:4]
    off = {}
    for least in (LEAST_CHUNKS, 16):
        monkeypatch.setattr(shift_prompts, "LEAST_CHUNKS", least)
        monkeypatch.setattr(shift_prompts, "_CHUNKS_FOR_A_PROMPT", 12)
        with FusedKVEngine(loaded, kv_dir=tmp_path / str(least), store_misses=False) as engine:
            engine.build_kv_cache(texts[:48], preprocess="wait", progress=False)
            assert bool(list((tmp_path / str(least)).glob("shift-map-*"))) == (least == 16)
            kv = {
                ratio: engine.prefill(rag_prompt(asked), recompute_ratio=ratio, max_tokens=1)[0] for ratio in (0.0, 1.0)
            }
            length = kv[1.0].cache.length
            for name in ("keys", "values"):
                reused, full = (getattr(kv[ratio].cache, name)[:, :, :, :length] for ratio in (0.0, 1.0))
                off[least, name] = float((reused - full).square().sum())
            for prompt in kv.values():
                prompt.cache.release()
    assert off[16, "keys"] < 0.95 * off[LEAST_CHUNKS, "keys"], off
    assert off[16, "values"] < off[LEAST_CHUNKS, "values"]
