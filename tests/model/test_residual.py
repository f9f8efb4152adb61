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
from fused_kv_llm.model.forward_pass import KVPass
from fused_kv_llm.model.residual import ResidualStream

IDS = torch.arange(3, 43)[None]
ROWS = torch.arange(40)
needs_native = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")


def _loaded(model: Any) -> Any:
    return load_model(model, tokenizer=smollm2_tokenizer())


def _logits(loaded: Any, forward_pass: ForwardPass | None = None) -> torch.Tensor:
    cache = FusedCache(loaded.geometry, 40, CachePool(loaded.dtype, torch.device("cpu")))
    with torch.inference_mode():
        return forward_rows(loaded, IDS, ROWS, cache, forward_pass or ForwardPass(ROWS, 40))


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


@needs_native
@pytest.mark.parametrize("last", [False, True])
def test_the_last_row_alone_is_that_of_all(last: bool) -> None:
    """The last layer goes by its parts where only one row of it is wanted, and by two calls otherwise."""
    loaded = _loaded(tiny_model(hidden_size=96, num_hidden_layers=3).bfloat16())
    every = _logits(loaded)
    one = _logits(loaded, ForwardPass(ROWS, 40, final_layer=2 if last else None))
    assert torch.equal(one[-1], every[-1])


def _seen(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    assert inputs[0].dtype == torch.bfloat16


def _add(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    inputs[0].add_(0.5)


def _add_to_output(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    output.add_(0.5)


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


@given(rows=st.lists(st.integers(0, 9), min_size=1, max_size=10, unique=True), changed=st.booleans())
def test_narrowed_rows_are_still_known(rows: list[int], changed: bool) -> None:
    stream, exact = ResidualStream(), torch.randn(1, 10, 4)
    hidden = stream.keep(exact, torch.bfloat16, exposed=True)
    assert hidden.dtype == torch.bfloat16
    assert stream.of(hidden.clone()).dtype == torch.bfloat16, "another tensor, even if it is equal"
    if changed:
        hidden[0, 0, 0] += 1
    picked = torch.tensor(sorted(rows))
    narrowed = stream.narrow(hidden, picked)
    assert torch.equal(narrowed, hidden[:, picked])
    assert torch.equal(stream.of(narrowed), narrowed if changed else exact[:, picked])


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
