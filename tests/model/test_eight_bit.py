"""A model's linear layers in eight bits: near its own, and only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from corpus import SHORT
from models import ARCHITECTURES, smollm2_tokenizer, tiny_model
from torch import Tensor

from fused_kv_kernels import has_eight_bit_linears, why_not_native
from fused_kv_llm.model import (
    CachePool,
    EightBitLinears,
    FusedCache,
    KVPass,
    LoadedModel,
    StoppedError,
    eight_bit,
    eight_bit_of,
    forward_kv,
    load_model,
)
from fused_kv_llm.model.pass_context import running
from fused_kv_llm.serving import loop_of

pytestmark = pytest.mark.skipif(
    why_not_native(torch.float32) is not None or not has_eight_bit_linears(), reason="no eight-bit products here"
)


needs_bfloat16 = pytest.mark.skipif(
    why_not_native() is not None or not has_eight_bit_linears(torch.bfloat16), reason="no eight-bit products here"
)


def model_of(architecture: str = "llama") -> Any:
    """Return a tiny model, no layer of which is too small."""
    options = {"head_dim": 32} if architecture == "qwen3" else {}
    return tiny_model(architecture, hidden_size=192, intermediate_size=256, **options)


def with_norms_of_its_own(model: Any) -> Any:
    """Return a model whose norms and biases all differ, so that none can be taken for another."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1.0, 0.5, generator=generator)
        elif name.endswith(".bias"):
            parameter.data.normal_(0.0, 1.0, generator=generator)
    return model


def loaded_of(model: Any) -> LoadedModel:
    return load_model(model, tokenizer=smollm2_tokenizer())


def linears_of(loaded: LoadedModel, stopped: Callable[[], bool] = lambda: False) -> EightBitLinears | None:
    return eight_bit_of(loaded, loop_of(loaded.model), stopped)


def kv_of(loaded: LoadedModel, linears: Any) -> tuple[Tensor, Tensor]:
    ids = loaded.tokenizer(SHORT[0])["input_ids"]
    rows = torch.arange(len(ids))
    cache = FusedCache(loaded.geometry, len(ids), CachePool(loaded.dtype, loaded.device, max_bytes=0))
    forward_pass = KVPass(rows, len(ids), loaded.geometry.num_layers - 1)
    forward_pass.linears = linears
    with torch.inference_mode():
        forward_kv(loaded, torch.tensor([ids]), rows, cache, forward_pass)
    return cache.keys.clone(), cache.values.clone()


def errors(loaded: LoadedModel, linears: Any) -> list[float]:
    """Return how far keys and values are from the model's own."""
    both = zip(kv_of(loaded, linears), kv_of(loaded, None), strict=True)
    return [float((got - want).norm() / want.norm()) for got, want in both]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)], ids=str)
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_keys_and_values_are_near_the_models_own(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loaded_of(with_norms_of_its_own(model_of(architecture)).to(dtype))
    linears = linears_of(loaded)
    if linears is None:
        raise AssertionError
    rounded = list[int]()

    def note(name: str, layers_of: Callable[..., Sequence[int]]) -> None:
        real = getattr(eight_bit, name)

        def noting(x: Tensor, *weights: Any) -> Any:
            rounded.append(len(layers_of(*weights)))
            return real(x, *weights)

        monkeypatch.setattr(eight_bit, name, noting)

    note("eight_bit_linears", lambda weights, *_: weights.sizes)
    note("eight_bit_gated_mlp", lambda gate_up, down: (*gate_up.sizes, *down.sizes))
    note("eight_bit_attended_mlp", lambda _, output, __, *mlp: [size for one in (output, *mlp) for size in one.sizes])
    # Random weights make much of small differences: what is off by 0.03 in a layer is off by more behind three.
    assert all(0 < error < 0.2 for error in errors(loaded, linears))
    *layers, last = loaded.model.get_decoder().layers
    plain = [module for layer in layers for module in layer.modules() if type(module) is torch.nn.Linear]
    # Behind its attention, the last layer makes no KV.
    of_last = last.self_attn.named_modules()
    plain += [module for name, module in of_last if type(module) is torch.nn.Linear and name != "o_proj"]
    assert sum(rounded) == len(plain), "all of them in eight bits, and once"


def test_large_channels_of_inputs_are_known_from_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    for layer in model.get_decoder().layers:
        layer.input_layernorm.weight.data[7] *= 300
        for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            module.weight.data[:, 7] /= 300
    loaded = loaded_of(model)
    known = errors(loaded, linears_of(loaded))
    real = eight_bit.eight_bit_weights
    monkeypatch.setattr(eight_bit, "eight_bit_weights", lambda layers, most: real(layers, torch.ones_like(most)))
    unknown = errors(loaded, linears_of(loaded))
    assert all(one < 0.6 * other for one, other in zip(known, unknown, strict=True))


def test_an_mlp_is_computed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_of(model_of())
    linears, calls, real = linears_of(loaded), list[torch.Size](), eight_bit.eight_bit_gated_mlp
    monkeypatch.setattr(
        eight_bit, "eight_bit_gated_mlp", lambda x, *weights: calls.append(x.shape) or real(x, *weights)
    )
    kv_of(loaded, linears)
    assert len(calls) == loaded.geometry.num_layers - 1, "the last one makes no KV"


@pytest.mark.parametrize(
    "name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
)
def test_a_layer_that_somebody_hooked_is_called(name: str) -> None:
    model, called = model_of(), list[bool]()
    model.get_decoder().layers[0].get_submodule(name).register_forward_hook(lambda *_: called.append(True))
    loaded = loaded_of(model)
    linears = linears_of(loaded)
    called.clear()
    kv_of(loaded, linears)
    assert called == [True]


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_layer_that_is_hooked_after_rounding_is_called(name: str) -> None:
    """Its MLP is computed layer by layer then."""
    loaded, called = loaded_of(model_of()), list[bool]()
    linears = linears_of(loaded)
    mlp = loaded.model.get_decoder().layers[0].mlp
    mlp.get_submodule(name).register_forward_hook(lambda *_: called.append(True))
    forward_pass = KVPass(torch.arange(3), 3, loaded.geometry.num_layers - 1)
    forward_pass.linears = linears
    with running(forward_pass), torch.inference_mode():
        mlp(torch.ones(1, 3, mlp.gate_proj.in_features))
    assert called == [True]


@needs_bfloat16
def test_a_layer_in_bfloat16_is_two_calls_around_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, calls = loaded_of(model_of().to(torch.bfloat16)), list[str]()
    linears = linears_of(loaded)

    def note(name: str) -> None:
        real = getattr(eight_bit, name)
        monkeypatch.setattr(eight_bit, name, lambda *operands: calls.append(name) or real(*operands))

    note("eight_bit_linears")
    note("eight_bit_attended_mlp")
    note("eight_bit_gated_mlp")
    kv_of(loaded, linears)
    # The last one ends with its keys and values.
    both = ["eight_bit_linears", "eight_bit_attended_mlp"]
    assert calls == both * (loaded.geometry.num_layers - 1) + both[:1]


@needs_bfloat16
@pytest.mark.parametrize(
    "name",
    ["input_layernorm", "post_attention_layernorm", "self_attn", "mlp", "self_attn.q_proj", "self_attn.o_proj",
     "mlp.down_proj"],
)  # fmt: skip
def test_a_part_of_a_layer_in_bfloat16_that_is_hooked_after_rounding_is_called(name: str) -> None:
    loaded, called = loaded_of(model_of().to(torch.bfloat16)), list[bool]()
    linears = linears_of(loaded)
    want = kv_of(loaded, linears)
    layer = loaded.model.get_decoder().layers[0]
    layer.get_submodule(name).register_forward_hook(lambda *_: called.append(True))
    for got, one in zip(kv_of(loaded, linears), want, strict=True):
        assert float((got - one).norm() / one.norm()) < 0.2
    assert called == [True]


@needs_bfloat16
@pytest.mark.parametrize("left", ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_layers_that_were_not_rounded_are_the_models_own(left: str) -> None:
    loaded = loaded_of(with_norms_of_its_own(model_of()).to(torch.bfloat16))
    linears = linears_of(loaded)
    if linears is None:
        raise AssertionError
    weights = dict(linears._weights)
    for layer in loaded.model.get_decoder().layers:
        weights.pop(layer.get_submodule(left), None)
    assert all(0 < one < 0.2 for one in errors(loaded, EightBitLinears(weights)))


def test_an_mlp_whose_gate_was_recorded_apart_is_left_layer_by_layer() -> None:
    loaded = loaded_of(model_of())
    linears = linears_of(loaded)
    if linears is None:
        raise AssertionError
    mlp, x = loaded.model.get_decoder().layers[0].mlp, torch.zeros(3, 192)
    assert linears.gated_mlp(mlp.gate_proj, mlp.down_proj, x) is not None
    assert linears.gated_mlp(mlp.down_proj, mlp.down_proj, x) is None
    assert linears.gated_mlp(mlp.up_proj, mlp.down_proj, x) is None


def test_layers_that_read_one_input_are_recorded_and_rounded_together() -> None:
    loaded = loaded_of(model_of())
    linears = linears_of(loaded)
    if linears is None:
        raise AssertionError
    layer = loaded.model.get_decoder().layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    firsts = (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)
    assert [len(linears._weights[first].sizes) for first in firsts] == [3, 1, 2, 1]
    assert not linears._weights.keys() & {attention.k_proj, attention.v_proj, mlp.up_proj}


def test_a_part_in_another_dtype_is_not_rounded() -> None:
    model = model_of()
    loaded = loaded_of(model)
    recording, layer = eight_bit._Recording(), model.get_decoder().layers[0].self_attn.q_proj
    layer.double()
    recording([layer], torch.ones(1, 3, 192, dtype=torch.float64))
    assert eight_bit._rounded(loaded, recording, lambda: False) == {}


def test_small_layers_and_routers_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert linears_of(loaded_of(tiny_model())) is None
    model = model_of()
    monkeypatch.setattr(eight_bit, "_routers", lambda model: set(model.modules()))
    loaded = loaded_of(model)
    assert linears_of(loaded) is None
    monkeypatch.undo()
    layer = model.get_decoder().layers[0]
    layer.router, layer.mlp.gate = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert eight_bit._routers(model) == {layer.router, layer.mlp.gate}


def test_what_is_computed_twice_is_known_by_the_larger_inputs() -> None:
    recording, layer = eight_bit._Recording(), torch.nn.Linear(3, 3)
    assert recording([layer], torch.tensor([[[9.0, 9, 9], [1, -5, 2]]])) is None
    recording([layer], torch.tensor([[[9.0, 9, 9], [-4, 1, 1], [0, 0, 3]]]))
    assert recording.seen[layer][1].tolist() == [4, 5, 3]


def test_a_sample_that_the_model_does_not_know_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_of(model_of())
    for ids in ([], [49152, 60000, -1], [5]):
        monkeypatch.setattr(type(loaded.tokenizer), "__call__", lambda *_, ids=ids: {"input_ids": ids})
        assert linears_of(loaded) is None


def test_making_them_can_be_stopped() -> None:
    loaded = loaded_of(model_of())
    asked = iter([False] * 5)
    with pytest.raises(StoppedError):
        linears_of(loaded, lambda: next(asked, True))
    assert next(asked, None) is None


def test_there_are_none_where_they_are_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_of(model_of())
    with monkeypatch.context() as patched:
        patched.setenv("FUSED_KV_KERNELS", "torch")
        assert linears_of(loaded) is None
    assert linears_of(loaded) is not None
    assert linears_of(loaded_of(tiny_model().half())) is None
