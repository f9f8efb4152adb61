"""Decoder layers that a decoding step computes together: as one by one, and only while nobody looks between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import smollm2_tokenizer, tiny_model
from torch import Tensor

from fused_kv_kernels import why_not_native
from fused_kv_llm.model import (
    CachePool,
    ForwardPass,
    FusedCache,
    LoadedModel,
    RaggedPart,
    decoder_layer,
    forward_ragged,
    forward_rows,
    load_model,
)
from fused_kv_llm.model.decoder_stack import layers_alike

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")
LENGTHS = (30, 7, 18)


def loaded_model(architecture: str = "llama", **options: Any) -> LoadedModel:
    sizes = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    return load_model(tiny_model(architecture, **sizes, **options).bfloat16(), tokenizer=smollm2_tokenizer())


def first_layer(loaded: LoadedModel) -> Any:
    return loaded.model.get_decoder().layers[0]


def decoded(loaded: LoadedModel) -> list[Tensor]:
    """Return the logits of four tokens after each of several prompts, decoded together."""
    with torch.inference_mode():
        caches = []
        for seed, length in enumerate(LENGTHS):
            cache = FusedCache(loaded.geometry, 40, CachePool(loaded.dtype, loaded.device))
            rows = torch.arange(length)
            ids = torch.randint(5, 1000, (1, length), generator=torch.Generator().manual_seed(seed))
            forward_rows(loaded, ids, rows, cache, ForwardPass(rows, length))
            caches.append(cache)
        found: list[Tensor] = []
        for step in range(4):
            ends = [torch.tensor([length + step]) for length in LENGTHS]
            parts = [RaggedPart(torch.tensor([7 + step]), cache, ForwardPass(end, int(end) + 1))
                     for cache, end in zip(caches, ends, strict=True)]  # fmt: skip
            found += forward_ragged(loaded, parts)
    return found


def one_by_one(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(decoder_layer, "layers_alike", lambda layer: [])
        return decoded(loaded)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}], ids=["", "window"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_decoding_step_is_what_its_layers_are(
    architecture: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if options and architecture == "llama":
        pytest.skip("has no windows")
    if architecture.startswith("qwen") and options:
        options = {**options, "use_sliding_window": True, "max_window_layers": 0}
    loaded = loaded_model(architecture, **options)
    # The last layer computes its end for the wanted rows only.
    assert len(layers_alike(first_layer(loaded))) == 4
    assert all(map(torch.equal, decoded(loaded), one_by_one(loaded, monkeypatch)))


def test_layers_of_another_kind_are_not_computed_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
    loaded = loaded_model("qwen3", layer_types=kinds, sliding_window=9, use_sliding_window=True)
    assert len(layers_alike(first_layer(loaded))) == 2
    assert all(map(torch.equal, decoded(loaded), one_by_one(loaded, monkeypatch)))


def _hook(layer: Any, seen: list[Tensor]) -> Any:
    return layer.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))


def _hook_before(layer: Any, seen: list[Tensor]) -> Any:
    return layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))


def _hook_part(layer: Any, seen: list[Tensor]) -> Any:
    return layer.mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))


@pytest.mark.parametrize("hook", [_hook, _hook_before, _hook_part])
def test_who_looks_between_layers_sees_them_one_by_one(
    hook: Callable[[Any, list[Tensor]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, seen, wanted = loaded_model(), list[Tensor](), list[Tensor]()
    layer = loaded.model.get_decoder().layers[2]
    handle = hook(layer, seen)
    assert len(layers_alike(first_layer(loaded))) == 2
    got = decoded(loaded)
    handle.remove()
    handle = hook(layer, wanted)
    want = one_by_one(loaded, monkeypatch)
    handle.remove()
    assert len(seen) == len(wanted) > 0
    assert all(map(torch.equal, seen, wanted))
    assert all(map(torch.equal, got, want))
    assert len(layers_alike(first_layer(loaded))) == 4


def test_a_layer_that_is_wrapped_or_taken_away_is_not_computed() -> None:
    loaded = loaded_model()
    decoder = loaded.model.get_decoder()
    own = decoder.layers[1].forward
    decoder.layers[1].forward = functools.partial(own)
    assert len(layers_alike(first_layer(loaded))) == 1
    decoder.layers[1].forward = own
    decoder.layers = decoder.layers[:3]
    assert len(layers_alike(first_layer(loaded))) == 3
    assert layers_alike(decoder.layers[1]) == []
