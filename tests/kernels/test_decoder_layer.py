"""A decoder layer around its attention: bit by bit what its operators give one by one, in one native call each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_kernels import (
    few_row_heads,
    few_row_linears,
    few_row_mlp,
    gated_silu,
    residual_norm,
    rms_norm,
    rotate_rows_,
    why_not_native,
)
from fused_kv_kernels import linears as module

needs_native = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def _drawn(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _layers(
    inner: int, outputs: list[int], bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    def drawn(*shape: int) -> torch.Tensor:
        return _drawn(*shape, dtype=dtype, generator=generator)

    return [(drawn(count, inner), drawn(count) if bias else None) for count in outputs]


@settings(max_examples=60)
@given(
    batch=st.integers(1, 2),
    rows=st.integers(0, 55),
    hidden=st.sampled_from([32, 40, 96, 576]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 32), (6, 4)]),
    options=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_heads_in_one_call_are_those_of_their_operators(
    batch: int,
    rows: int,
    hidden: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    options: tuple[bool, bool, bool],
    dtype: torch.dtype,
    seed: int,
) -> None:
    (dim, rotary), (bias, normed, shared) = dims, options
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return _drawn(*shape, dtype=dtype, generator=generator)

    x, norm = torch.randn(rows, batch, hidden, generator=generator).transpose(0, 1), drawn(hidden)
    layers = _layers(hidden, [heads[0] * dim, heads[1] * dim, heads[1] * dim], bias, dtype, generator)
    of_heads = (drawn(dim), drawn(dim), 1e-6) if normed else None
    tables = drawn(1 if shared else batch, rows, rotary), drawn(1 if shared else batch, rows, rotary)
    before = x.clone()
    with torch.inference_mode():
        got = few_row_heads(x, norm, 1e-5, layers, *tables, dim, of_heads)
        want = [
            part.unflatten(-1, (part.shape[-1] // dim, dim))
            for part in few_row_linears(residual_norm(x, norm, 1e-5), layers)
        ]
        if of_heads is not None:
            want[:2] = [rms_norm(part, of_heads[i], of_heads[2]) for i, part in enumerate(want[:2])]
        for i, part in enumerate(got):
            assert part.shape == (batch, heads[i > 0], rows, dim)
            wanted = want[i].transpose(1, 2)
            assert torch.equal(part, rotate_rows_(wanted, *tables) if i < 2 else wanted)
    assert torch.equal(x, before)


def test_heads_that_do_not_fit_are_told() -> None:
    x, norm, table = torch.randn(1, 3, 64), torch.ones(64), torch.ones(1, 3, 16)
    layers = [(torch.randn(count, 64), None) for count in (32, 16, 16)]
    for wrong in (
        (x[0], norm, layers, 16, None),
        (x, norm[:32], layers, 16, None),
        (x, norm, layers[:2], 16, None),
        (x, norm, layers, 12, None),
        (x, norm, [(torch.randn(32, 32), None), *layers[1:]], 16, None),
        (x, norm, layers, 16, (torch.ones(16), torch.ones(8), 1e-5)),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            few_row_heads(wrong[0], wrong[1], 1e-5, wrong[2], table, table, wrong[3], wrong[4])
    with pytest.raises(RuntimeError):
        few_row_heads(x, norm, 1e-5, layers, table[:, :2], table[:, :2], 16)
    for dtype in (torch.float16, torch.float64, torch.int64):
        with pytest.raises(ValueError, match="the residual stream is float32"):
            residual_norm(x.to(dtype), norm.bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="the residual stream is float32"):
        few_row_heads(x.bfloat16(), norm, 1e-5, layers, table, table, 16)


@settings(max_examples=40)
@given(
    rows=st.integers(0, 55),
    hidden=st.sampled_from([32, 40, 96, 576]),
    width=st.sampled_from([32, 52, 96, 192]),
    bias=st.booleans(),
    attention=st.sampled_from([0, 32, 48, 64]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_an_mlp_in_one_call_is_that_of_its_operators(
    rows: int, hidden: int, width: int, bias: bool, attention: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, hidden, generator=generator).transpose(0, 1)
    norm = torch.randn(hidden, generator=generator).to(dtype)
    gate, up = _layers(hidden, [width, width], bias, dtype, generator)
    (down,) = _layers(width, [hidden], bias, dtype, generator)
    attended = None
    if attention:
        (output,) = _layers(attention, [hidden], bias, dtype, generator)
        attended = (_drawn(2, rows, attention, dtype=dtype, generator=generator), output)
    before = x.clone()
    with torch.inference_mode():
        got = few_row_mlp(x, norm, 1e-5, gate, up, down, attended)
        assert torch.equal(x, before)
        if attended is not None:
            x = x + few_row_linears(attended[0], [attended[1]])[0]
        gated = gated_silu(*few_row_linears(residual_norm(x, norm, 1e-5), [gate, up]))
        want = x + few_row_linears(gated, [down])[0]
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@needs_native
def test_few_rows_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native_linears", lambda *_: pytest.fail("its operators were called one by one"))
    generator = torch.Generator().manual_seed(0)
    gate, up, down = *_layers(64, [96, 96], False, torch.bfloat16, generator), (torch.randn(64, 96).bfloat16(), None)
    x, norm, table = torch.randn(1, 5, 64), torch.ones(64).bfloat16(), torch.ones(1, 5, 32).bfloat16()
    few_row_mlp(x, norm, 1e-5, gate, up, down)
    few_row_mlp(x, norm, 1e-5, gate, up, down, (torch.randn(1, 5, 96).bfloat16(), down))
    few_row_heads(x, norm, 1e-5, [gate, up, up], table, table, 32)


def test_an_mlp_that_does_not_fit_is_told() -> None:
    x, norm, (gate, down) = torch.randn(3, 64), torch.ones(64), (torch.randn(96, 64), torch.randn(64, 96))
    for wrong in (
        (norm[:32], gate, gate, down),
        (norm, gate, gate[:64], down),
        (norm, gate, gate, down[:32]),
        (norm, gate, gate, down[:, :64]),
        (norm, gate[:, :32], gate, down),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            few_row_mlp(x, wrong[0], 1e-5, *((weight, None) for weight in wrong[1:]))
    with pytest.raises(ValueError, match="the residual stream is float32"):
        few_row_mlp(x.bfloat16(), norm, 1e-5, (gate, None), (gate, None), (down, None))
    for rows, output in ((x[:2], gate[:64]), (x, down), (x, gate)):
        with pytest.raises(ValueError, match="do not fit together"):
            few_row_mlp(x, norm, 1e-5, (gate, None), (gate, None), (down, None), (rows, (output, None)))
