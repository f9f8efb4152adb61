"""The residual stream in float32: nearer to float32's numbers, seen by nobody, and every change is obeyed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model

from fused_kv_kernels import why_not_native
from fused_kv_llm.model import CachePool, ForwardPass, FusedCache, forward_kv, forward_rows, load_model
from fused_kv_llm.model.decoder_stack import is_first_of_own, layers_alike, may_pause
from fused_kv_llm.model.forward_pass import KVPass
from fused_kv_llm.model.narrowing import NarrowingPass
from fused_kv_llm.model.residual import ResidualStream

IDS = torch.arange(3, 43)[None]
ROWS = torch.arange(40)
needs_native = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")


def _loaded(model: Any) -> Any:
    return load_model(model, tokenizer=smollm2_tokenizer())


def _logits(loaded: Any, *passes: ForwardPass) -> torch.Tensor:
    """Return the logits of the last of several passes over the same tokens."""
    cache = FusedCache(loaded.geometry, 40, CachePool(loaded.dtype, torch.device("cpu")))
    with torch.inference_mode():
        for one in passes or (ForwardPass(ROWS, 40),):
            found = forward_rows(loaded, IDS, ROWS, cache, one)
    return found


def _off_by(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).square().mean().sqrt())


@needs_native
def test_a_forward_is_nearer_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SmolLM2's. With sums that are rounded, as transformers rounds them, it is half as far off again."""
    exact = _logits(load_model("smollm2-135m", dtype="float32"))
    loaded = load_model("smollm2-135m", dtype="bfloat16")
    kept = _off_by(_logits(loaded), exact)
    monkeypatch.setattr(ResidualStream, "of", lambda self, hidden, **_: hidden)
    assert 1.5 * kept < _off_by(_logits(loaded), exact)


def _known(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that says, for everyone who asks for hidden states from now on, whether they were known."""
    seen, real = list[bool](), ResidualStream.of

    def of(self: ResidualStream, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        found = real(self, hidden, **options)
        seen.append(found is not hidden)
        return found

    monkeypatch.setattr(ResidualStream, "of", of)
    return seen


@needs_native
def test_every_layer_knows_what_the_one_before_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the norm behind the last one, which goes by its parts: it asks four times. The first gets embeddings."""
    loaded, seen = _loaded(tiny_model(hidden_size=96, num_hidden_layers=4).bfloat16()), _known(monkeypatch)
    _logits(loaded)
    assert seen == [False, *[True] * 2, *[True] * 4, True]


@needs_native
def test_rows_that_stay_are_known_to_the_next_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _loaded(tiny_model(hidden_size=96, num_hidden_layers=4).bfloat16())
    leaving = NarrowingPass(ROWS, 40, (), 3)
    real = leaving.attend

    def attend(layer_idx: int, *rest: Any) -> torch.Tensor:
        if layer_idx == 1:
            leaving.keep(torch.arange(30, 40))
        return real(layer_idx, *rest)

    leaving.attend = attend  # type: ignore[method-assign]
    seen = _known(monkeypatch)
    # Before, all rows leave their keys and values for those that stay.
    _logits(loaded, ForwardPass(ROWS, 40), leaving)
    del seen[: len(seen) // 2]
    assert leaving.rows.tolist() == list(range(30, 40))
    assert not seen[0]
    assert all(seen[1:])


def _seen(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    assert inputs[0].dtype == torch.bfloat16


def _add(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    inputs[0].add_(0.5)


def _add_to_output(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    output.add_(0.5)


def _add_to_last_row(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    output[:, -1].add_(0.5)


def _before(hook: Callable[..., Any], path: str) -> Callable[[Any], Any]:
    return lambda model: model.get_decoder().get_submodule(path).register_forward_pre_hook(hook)


def _behind(hook: Callable[..., Any], path: str) -> Callable[[Any], Any]:
    return lambda model: model.get_decoder().get_submodule(path).register_forward_hook(hook)


@needs_native
@pytest.mark.parametrize("path", ["layers.1", "layers.1.input_layernorm", "layers.1.post_attention_layernorm", "norm"])
def test_who_looks_sees_the_models_dtype_and_changes_nothing(path: str) -> None:
    loaded = _loaded(tiny_model(hidden_size=96, num_hidden_layers=3).bfloat16())
    want = _logits(loaded)
    _before(_seen, path)(loaded.model)
    assert torch.equal(_logits(loaded), want)


@needs_native
@pytest.mark.parametrize(
    "hook",
    [
        _before(_add, "layers.1"),
        _behind(_add_to_output, "layers.1"),
        _behind(_add_to_output, "layers.0"),
        _before(_add, "layers.1.input_layernorm"),
        _before(_add, "layers.1.post_attention_layernorm"),
        _before(_add, "norm"),
    ],
)
def test_a_change_in_place_is_obeyed(hook: Callable[[Any], Any]) -> None:
    """As much as transformers itself obeys it: the same hooks are called in its own forward."""
    model = tiny_model(hidden_size=96, num_hidden_layers=3).bfloat16()
    loaded = _loaded(model)
    before = _logits(loaded)
    hook(model)
    with torch.inference_mode():
        want = tiny_model(hidden_size=96, num_hidden_layers=3).bfloat16()
        hook(want)
        expected = want(IDS).logits[0].float()
    assert _off_by(_logits(loaded), expected) < 0.05 * _off_by(before, expected)


class _Steered(torch.nn.Module):
    """Stands in a layer's place, and changes what it is given or gives in place."""

    def __init__(self, layer: Any, before: bool) -> None:
        super().__init__()
        self.layer = layer
        self.before = before

    def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.before:
            hidden.add_(0.5)
        found: torch.Tensor = self.layer(hidden, **options)
        return found if self.before else found.add_(0.5)


def _steered(before: bool) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        layers = model.get_decoder().layers
        layers[1] = _Steered(layers[1], before)

    return change


def _class_that_adds(model: Any) -> None:
    layer = model.get_decoder().layers[2]
    own = type(layer).__call__

    class Called(type(layer)):  # type: ignore[misc]
        def __call__(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
            found: torch.Tensor = own(self, hidden.add_(0.5), **options)
            return found

    layer.__class__ = Called


@needs_native
@pytest.mark.parametrize("change", [_steered(True), _steered(False), _class_that_adds])
def test_a_change_between_layers_is_obeyed(change: Callable[[Any], Any]) -> None:
    """By somebody who is no hook, after the model was loaded."""
    model = tiny_model(hidden_size=96, num_hidden_layers=4).bfloat16()
    loaded = _loaded(model)
    before = _logits(loaded)
    change(model)
    changed = tiny_model(hidden_size=96, num_hidden_layers=4).bfloat16()
    change(changed)
    with torch.inference_mode():
        expected = changed(IDS).logits[0].float()
    assert _off_by(_logits(loaded), expected) < 0.05 * _off_by(before, expected)


@needs_native
def test_a_class_that_is_called_otherwise_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched after a pass, which has looked at its code."""
    model = tiny_model(hidden_size=96, num_hidden_layers=4).bfloat16()
    loaded = _loaded(model)
    before = _logits(loaded)
    kind = type(model.get_decoder().layers[1].mlp)
    own = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda self, hidden: own(self, hidden) + 0.5)
    with torch.inference_mode():
        expected = tiny_model(hidden_size=96, num_hidden_layers=4).bfloat16()(IDS).logits[0].float()
    assert _off_by(_logits(loaded), expected) < 0.05 * _off_by(before, expected)


@needs_native
def test_a_hook_that_is_added_meanwhile_is_obeyed() -> None:
    loaded = _loaded(tiny_model(hidden_size=96, num_hidden_layers=4).bfloat16())
    before, layers = _logits(loaded), loaded.model.get_decoder().layers
    handles = []

    def add(*_: Any) -> None:
        handles.append(layers[2].register_forward_pre_hook(_add))

    layers[0].input_layernorm.register_forward_hook(add)
    first = _logits(loaded)
    assert (first - before).abs().max() > 0.1
    handles.pop().remove()
    assert torch.equal(_logits(loaded), first)


@needs_native
def test_a_patched_loop_is_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither may a forward be left there, nor are its layers one call, nor is the stream taken to be private."""
    loaded = _loaded(tiny_model(hidden_size=96, num_hidden_layers=4).bfloat16())
    decoder = loaded.model.get_decoder()
    first = decoder.layers[0]
    assert may_pause(decoder)
    assert is_first_of_own(first)
    assert len(layers_alike(first)) == 3
    own = type(decoder).forward

    def patched(self: Any, *args: Any, **options: Any) -> Any:
        return own(self, *args, **options)

    monkeypatch.setattr(type(decoder), "forward", patched)
    assert not may_pause(decoder)
    assert not is_first_of_own(first)
    assert layers_alike(first) == []


@needs_native
def test_a_changed_row_leaves_the_others_as_they_are() -> None:
    loaded = _loaded(tiny_model(hidden_size=96, num_hidden_layers=3).bfloat16())
    before = _logits(loaded)
    _behind(_add_to_last_row, "layers.0")(loaded.model)
    got = _logits(loaded)
    assert torch.equal(got[:-1], before[:-1])
    assert not torch.equal(got[-1], before[-1])


@needs_native
def test_norms_of_another_dtype_are_the_models_own() -> None:
    model = tiny_model(hidden_size=96)
    with torch.inference_mode():
        want = model(IDS).logits[0]
    for name, part in model.named_modules():
        if name.endswith("norm"):
            part.bfloat16()
    torch.testing.assert_close(_logits(_loaded(model)), want, atol=1e-4, rtol=1e-4)


@given(rows=st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True), changed=st.booleans())
def test_narrowed_rows_are_still_known(rows: list[int], changed: bool) -> None:
    stream, exact = ResidualStream(), torch.randn(1, 10, 4)
    hidden = stream.keep(exact, torch.bfloat16)
    assert hidden.dtype == torch.bfloat16
    assert stream.of(hidden.clone()).dtype == torch.bfloat16, "another tensor, even if it is equal"
    if changed:
        hidden[0, 0, 0] += 1
    picked = torch.tensor(sorted(rows))
    narrowed = stream.narrow(hidden, picked)
    assert torch.equal(narrowed, hidden[:, picked])
    want = exact.clone()
    if changed:
        want[0, 0, 0] = hidden[0, 0, 0]
    assert torch.equal(stream.of(narrowed), want[:, picked])


@needs_native
def test_nothing_is_kept_when_a_pass_is_over() -> None:
    loaded = _loaded(tiny_model(hidden_size=96).bfloat16())
    for forward_pass in (every := ForwardPass(ROWS, 40), keys := KVPass(ROWS, 40, 1)):
        cache = FusedCache(loaded.geometry, 40, CachePool(torch.bfloat16, torch.device("cpu")))
        with torch.inference_mode():
            if forward_pass is keys:
                forward_kv(loaded, IDS, ROWS, cache, forward_pass)
            else:
                forward_rows(loaded, IDS, ROWS, cache, forward_pass)
    assert every.residual._kept is keys.residual._kept is None
