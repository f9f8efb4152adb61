"""Context shifts in a prompt: the loaded KV is the stored one plus the weighted difference, turned to its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from corpus import SHORT, UnusedEmbedder, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_kernels.reference import rerotate_keys_reference
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_NEIGHBOURS, DEFAULT_PREPROCESSING_PROMPTS
from fused_kv_llm.context_shift import place_weight, shift_name
from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.report import FusionReport

from .reference_fusion import stitched_kv

SHIFT = shift_name(DEFAULT_NEIGHBOURS, DEFAULT_PREPROCESSING_PROMPTS)
GRAPH = {text: [other for other in SHORT[:4] if other != text][:2] for text in SHORT[:4]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    folder: Path = tmp_path_factory.mktemp("shifting")
    options = {"preprocessing": "similar", "embedder": UnusedEmbedder(), "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as engine:
        engine.build_kv_cache(SHORT[:4], neighbours=GRAPH, preprocess="wait", progress=False)
        yield engine


def expected_kv(engine: FusedKVEngine, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
    request = engine.requests.planner.plan(prompt, FusionReport())
    cache, geometry = stitched_kv(engine, request), engine.loaded.geometry
    for chunk in request.chunks:
        side = engine.store.sidecars.read(chunk.stored.key, SHIFT)
        assert side is not None
        segment = chunk.segment
        weight = place_weight(segment.start - request.prefix_tokens, chunk.stored.num_tokens)
        inside = slice(segment.chunk_start, segment.chunk_start + chunk.num_tokens)
        for name, target in (("keys", cache.keys), ("values", cache.values)):
            change = (side[name] * side[f"{name}_scale"])[:, :, inside] * weight
            if name == "keys":
                turns = torch.full((chunk.num_tokens,), chunk.delta)
                change = rerotate_keys_reference(change, turns, geometry.rotations[0].inv_freq)
            target[:, 0, :, segment.start : segment.stop] += change
        chunk.stored.close()
    chunk = request.chunk_positions
    return cache.keys[:, 0, :, chunk], cache.values[:, 0, :, chunk]


@pytest.mark.parametrize("texts", [SHORT[:4], [SHORT[2], SHORT[0], SHORT[2]]], ids=["four", "one twice"])
def test_chunks_are_shifted_by_their_place(engine: FusedKVEngine, texts: list[str]) -> None:
    prompt = rag_prompt(texts)
    want = expected_kv(engine, prompt)
    fused, report = engine.prefill(prompt, recompute_ratio=0.0)
    assert report.chunks_found == len(texts)
    chunk = torch.tensor(
        [i for i, kind in enumerate(engine.requests.planner.plan(prompt, FusionReport()).kind) if kind >= 0]
    )
    for name, part in zip(("keys", "values"), want, strict=True):
        got = getattr(fused.cache, name)[:, 0, :, chunk]
        torch.testing.assert_close(got, part, atol=1e-5, rtol=1e-5)
    fused.cache.release()


def test_a_chunk_right_after_the_header_is_exact(tmp_path: Path) -> None:
    options = {
        "preprocessing": "similar",
        "embedder": UnusedEmbedder(),
        "store_misses": False,
        "wrap_chat_template": False,
    }
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:4], neighbours=GRAPH, preprocess="wait", progress=False)
        prompt = SHORT[0] + "\n\nWhat is it about, please?"
        reused, report = engine.prefill(prompt, recompute_ratio=0.0)
        full, _ = engine.prefill(prompt, recompute_ratio=1.0)
        assert report.reused_tokens > 10
        torch.testing.assert_close(reused.logits, full.logits, atol=1e-4, rtol=1e-4)


def test_what_a_selector_sees_includes_the_sidecars(engine: FusedKVEngine) -> None:
    prompt = rag_prompt(SHORT[:4])
    sides = sum(
        tensor.nbytes
        for text in SHORT[:4]
        for tensor in (engine.store.sidecars.read(str(engine.chunk_id(text)), SHIFT) or {}).values()
    )
    report = engine.prefill(prompt, recompute_ratio=0.2, selector="prophetkv")[1]
    assert report.selection_bytes == sum(report.bytes_loaded.values()) + sides


@pytest.mark.parametrize(("ratio", "selector"), [(0.0, "prophetkv"), (0.2, "prophetkv"), (0.2, "boundary")])
def test_the_report_counts_what_is_loaded_of_context_shifts_once(
    engine: FusedKVEngine, ratio: float, selector: str
) -> None:
    texts = [SHORT[1], SHORT[2], SHORT[1]]
    shifts = [engine.store.sidecars.read(str(engine.chunk_id(text)), SHIFT) for text in texts[:2]]
    nbytes = sum(tensor.nbytes for side in shifts if side is not None for tensor in side.values())
    assert nbytes > 0
    for _ in range(3):
        _, report = engine.prefill(rag_prompt(texts), recompute_ratio=ratio, selector=selector)
        assert report.sidecar_bytes_loaded == {"context_shift": nbytes}
    assert engine.prefill(rag_prompt(texts), recompute_ratio=1.0)[1].sidecar_bytes_loaded == {}


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_shifts_read_by_layers_and_kept_ones_give_the_same(
    tmp_path: Path, memory_bytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_kv_llm.engine.requests.reader_threads", lambda device: threads)
    options = {
        "preprocessing": "similar",
        "embedder": UnusedEmbedder(),
        "store_misses": False,
        "memory_bytes": memory_bytes,
    }
    model = tiny_model(num_hidden_layers=6)
    with FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:4], neighbours=GRAPH, preprocess="wait", progress=False)
        for ratio in (0.0, 0.2):
            engine.store.drop_memory()
            logits = [engine.prefill(rag_prompt(SHORT[:4]), recompute_ratio=ratio)[0].logits for _ in range(3)]
            assert torch.equal(logits[0], logits[1])
            assert torch.equal(logits[0], logits[2])


def test_a_damaged_shift_costs_the_chunk_and_nothing_else(tmp_path: Path) -> None:
    options = {"preprocessing": "similar", "embedder": UnusedEmbedder(), "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:4], neighbours=GRAPH, preprocess="wait", progress=False)
        key = str(engine.chunk_id(SHORT[2]))
        (side,) = (path for path in tmp_path.rglob(f"*{SHIFT}*") if key in str(path))
        raw = bytearray(side.read_bytes())
        raw[-1] ^= 1
        side.write_bytes(raw)
        prompt = rag_prompt(SHORT[:4])
        with pytest.warns(FusedKVWarning, match="checksum"):
            fused, report = engine.prefill(prompt, recompute_ratio=0.0)
        assert (report.chunks_found, report.chunks_missed) == (3, 1)
        assert bool(fused.logits.isfinite().all())
        again = engine.prefill(prompt, recompute_ratio=0.0)[0]
        assert torch.equal(fused.logits, again.logits)


def test_a_shift_of_a_model_with_other_layers_is_done_without(tmp_path: Path) -> None:
    """It is whole, so only its rows tell; the chunk's KV is used all the same, as it is stored."""
    options = {"preprocessing": "similar", "embedder": UnusedEmbedder(), "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:4], neighbours=GRAPH, preprocess="wait", progress=False)
        prompt, key = rag_prompt(SHORT[:4]), str(engine.chunk_id(SHORT[2]))
        side = engine.store.sidecars.read(key, SHIFT)
        assert side is not None
        shifted = engine.prefill(prompt, recompute_ratio=0.0)[0].logits
        fewer = {name: tensor[:-1] for name, tensor in side.items()}
        engine.store.sidecars.put(key, SHIFT, fewer, by_rows=True)
        with pytest.warns(FusedKVWarning, match="layers"):
            fused, report = engine.prefill(prompt, recompute_ratio=0.0)
        assert report.chunks_found == 4
        nothing = {name: torch.zeros_like(tensor) for name, tensor in side.items()}
        engine.store.sidecars.put(key, SHIFT, nothing, by_rows=True)
        assert torch.equal(fused.logits, engine.prefill(prompt, recompute_ratio=0.0)[0].logits)
        assert not torch.equal(fused.logits, shifted)
