"""Layers whose KV differs in shape, and layers that attend to the KV of others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer
from tiny_families import tiny_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model import (
    CachePool,
    ForwardPass,
    FusedCache,
    KVShape,
    LoadedModel,
    compute_prefix,
    forward_rows,
    load_model,
    verification,
)
from fused_kv_llm.selectors import SELECTORS

SHARING = ("gemma3n_text", "gemma4_text")


def load(kind: str, **options: Any) -> LoadedModel:
    return load_model(tiny_model(kind, vocab_size=1024, **options), tokenizer=smollm2_tokenizer())


def run(loaded: LoadedModel, final_layer: int | None = None) -> Tensor:
    rows = torch.arange(6)
    cache = FusedCache(loaded.geometry, 6, CachePool(loaded.dtype, loaded.device))
    with torch.inference_mode():
        return forward_rows(loaded, rows[None], rows, cache, ForwardPass(rows, 6, final_layer=final_layer))


def test_shapes_are_found_by_layer() -> None:
    gemma = load("gemma4_text").geometry
    assert gemma.shapes == (KVShape(2, 16, 16), KVShape(1, 32, 32)) * 2
    assert gemma.room == KVShape(2, 32, 32)
    assert (gemma.num_layers, gemma.last_layer, gemma.global_layers) == (4, 5, (1, 3))
    assert gemma.kv_bytes_per_token(torch.bfloat16) == 4 * 2 * 64 * 2
    mimo = load("mimo_v2_flash").geometry
    assert mimo.shapes == (KVShape(2, 24, 16), KVShape(4, 24, 16)) * 2
    assert (mimo.num_layers, mimo.last_layer) == (4, 3)
    same = load("gemma3n_text").geometry
    assert set(same.shapes) == {same.room}
    assert (same.num_layers, same.last_layer) == (4, 5)


def test_behind_a_layers_own_kv_stand_zeros() -> None:
    loaded = load("gemma4_text")
    prefix = compute_prefix(loaded, (5, 6, 7))
    assert prefix.keys.shape == prefix.values.shape == (4, 2, 3, 32)
    for part in (prefix.keys, prefix.values):
        assert part[0, :, :, 16:].abs().max() == part[1, 1].abs().max() == 0.0
        assert part[0, :, :, :16].abs().min() > 0.0
        assert part[1, 0].abs().min() > 0.0


@pytest.mark.parametrize("kind", SHARING)
def test_a_layer_without_kv_that_attends_elsewhere_is_an_error(kind: str) -> None:
    """A pass that ends with the last KV, as a chunk's prefill does, does not get there."""
    loaded = load(kind)
    attention = loaded.model.model.layers[4].self_attn

    def own(module: Any, hidden_states: Tensor, shared_kv_states: Any, **_: Any) -> tuple[Tensor, None]:
        q = module.q_proj(hidden_states).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = shared_kv_states[module.layer_type]
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return module.o_proj(attended.transpose(1, 2).flatten(2)), None

    attention.forward = own.__get__(attention)
    with pytest.raises(UnsupportedModelError, match="Layer 4 of the model does not attend through the engine"):
        run(loaded)
    with pytest.raises(UnsupportedModelError, match="Layer 4 of the model does not attend through the engine"):
        load_model(loaded.model, tokenizer=smollm2_tokenizer())


@pytest.mark.parametrize("kind", SHARING)
def test_a_layer_without_kv_sees_what_a_cache_holds_or_nothing(kind: str) -> None:
    """Keys that it made itself would not be those that are stored."""
    loaded = load(kind)
    attention = loaded.model.model.layers[4].self_attn
    given = type(attention).forward

    def copied(*args: Any, shared_kv_states: Any, **options: Any) -> Any:
        shared = {name: tuple(part.clone() for part in parts) for name, parts in shared_kv_states.items()}
        return given(attention, *args, shared_kv_states=shared, **options)

    attention.forward = copied
    with pytest.raises(UnsupportedModelError, match="Layer 4 of the model does not attend through the engine"):
        run(loaded)


@pytest.mark.parametrize("kind", SHARING)
def test_a_pass_for_kv_ends_with_the_last_layer_that_has_any(kind: str) -> None:
    loaded = load(kind)
    loaded.model.model.layers[4].forward = lambda *args, **options: pytest.fail("a layer behind it was run")
    assert compute_prefix(loaded, (5, 6, 7)).keys.shape[0] == 4


@pytest.mark.parametrize("kind", SHARING)
def test_the_last_row_alone_is_that_of_all(kind: str) -> None:
    """It goes on alone behind the layers that have KV: nothing uses the others."""
    loaded = load(kind)
    seen = []
    for layer in loaded.model.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    run(loaded, loaded.geometry.last_layer)
    assert seen == [6, 6, 6, 6, 1, 1]
    torch.testing.assert_close(run(loaded, loaded.geometry.last_layer), run(loaded)[-1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("owns", [(True, False, True), (False, True, True), (False, False)])
def test_layers_with_kv_of_their_own_come_first(owns: tuple[bool, ...]) -> None:
    part = torch.zeros(1, 2, 3, 4)
    layers = [SimpleNamespace(keys=part if own else None, values=part if own else None) for own in owns]
    with pytest.raises(UnsupportedModelError, match="stand before layers with KV of their own"):
        verification._with_kv(layers, "somebody's")


def test_padding_is_no_part_of_what_is_checked(tmp_path: Path) -> None:
    """Memory behind a layer's KV is whatever was there before."""
    loaded = load("gemma4_text")
    pool = CachePool(loaded.dtype, loaded.device)
    rows, found = torch.arange(6), []
    for filling in (float("nan"), 0.0):
        cache = FusedCache(loaded.geometry, 6, pool)
        cache.keys.fill_(filling)
        cache.values.fill_(filling)
        with torch.inference_mode():
            found.append(forward_rows(loaded, rows[None], rows, cache, ForwardPass(rows, 6)))
            half = torch.tensor([1, 3, 5])
            found.append(forward_rows(loaded, half[None], half, cache, ForwardPass(half, rows)))
        cache.release()
    for got in (found[0][-1:], found[1][-1:], found[3][-1:]):
        torch.testing.assert_close(got, found[2][-1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [*SHARING, "mimo_v2_flash"])
def test_answers_go_on_as_transformers_do(kind: str, tmp_path: Path) -> None:
    """Decoding behind a fused prompt: greedy tokens, at ratio 1."""
    model = tiny_model(kind)
    with FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, preprocessing="none") as engine:
        engine.build_kv_cache(["Ferry number three carries 30 passengers and four cars."], progress=False)
        prompt = "Ferry number three carries 30 passengers and four cars.\n\nHow many passengers does it carry?"
        ids = engine.encode(prompt)
        fused, _ = engine.prefill(prompt, recompute_ratio=1.0, max_tokens=6)
        logits, got = fused.logits, []
        for _ in range(6):
            got.append(int(logits.argmax()))
            logits = fused.append(engine.loaded, [got[-1]])[-1]
        with torch.inference_mode():
            want = list(ids)
            for _ in range(6):
                want.append(int(engine.model(torch.tensor([want]), use_cache=False).logits[0, -1].argmax()))
        assert got == want[len(ids) :]


@pytest.mark.parametrize("kind", [*SHARING, "mimo_v2_flash"])
def test_every_selector_works(kind: str, tmp_path: Path) -> None:
    """Also those that look at anchors, at the first layers, or drop rows on the way; with context shifts."""
    options: dict[str, Any] = {"tokenizer": smollm2_tokenizer(), "kv_dir": tmp_path, "store_misses": False}
    with FusedKVEngine(tiny_model(kind), **options) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False, preprocess="wait")
        for with_anchors in ("qcfuse", "sink_attention_anchors"):
            assert engine.build_anchors(SHORT[:4], selector=with_anchors, progress=False) == 4
        prompt = rag_prompt(SHORT[:4])
        for name in SELECTORS:
            fused, report = engine.prefill(prompt, recompute_ratio=0.4, selector=name)
            assert report.chunks_found == 4
            assert not any("anchors" in warning for warning in report.warnings)
            assert bool(fused.logits.isfinite().all()), name
            most = (1.0 if name == "prefix_cache" else 0.4) * (report.recomputed_tokens + report.reused_tokens)
            assert report.recomputed_tokens <= most + 1
        assert engine.generate(prompt, max_tokens=4, recompute_ratio=0.4).report.completion_tokens > 0
