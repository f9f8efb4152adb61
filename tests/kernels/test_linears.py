"""Linear layers of few rows against torch in float32: any shapes, and the same bits whatever is computed beside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near
from torch.nn.functional import linear

from fused_kv_kernels import few_row_linears, why_not_native
from fused_kv_kernels import linears as module
from fused_kv_kernels.native import most_linear_rows

needs_native = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")
DTYPES = (torch.float32, torch.bfloat16)


def _layers(
    inner: int, outputs: list[int], bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    # Outputs of about 1, as the layers of models have, whatever the number of terms.
    return [(drawn(count, inner) / inner**0.5, drawn(count) if bias else None) for count in outputs]


@settings(max_examples=60)
@given(
    rows=st.integers(0, 110),
    inner=st.sampled_from([1, 31, 32, 48, 64, 96, 576]),
    outputs=st.lists(st.sampled_from([1, 4, 6, 8, 52, 192]), min_size=1, max_size=3),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_few_row_linears(rows: int, inner: int, outputs: list[int], bias: bool, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, inner, generator=generator).to(dtype).transpose(0, 1)
    layers = _layers(inner, outputs, bias, dtype, generator)
    with torch.inference_mode():
        found = few_row_linears(x, layers)
    for got, (weight, offset) in zip(found, layers, strict=True):
        want = linear(x.float(), weight.float(), None if offset is None else offset.float())
        assert got.dtype == dtype
        assert_near(got, want, dtype)


@needs_native
def test_a_row_is_the_same_whatever_else_is_computed() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = _layers(96, [20, 8], True, torch.bfloat16, generator)
    x = torch.randn(min(40, most_linear_rows(torch.bfloat16)), 96, generator=generator).bfloat16()
    together = few_row_linears(x, layers)
    threads = torch.get_num_threads()
    try:
        for row in range(x.shape[0]):
            torch.set_num_threads(1 + row % 2)
            alone = few_row_linears(x[row : row + 1], layers[row % 2 :])
            assert torch.equal(alone[0][0], together[row % 2][row])
    finally:
        torch.set_num_threads(threads)


@needs_native
def test_what_the_native_operator_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(module, "native_linears", lambda x, layers: calls.append(1) or [linear(x, layers[0][0])])
    most = most_linear_rows(torch.bfloat16)
    x, weight = torch.randn(most, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    few_row_linears(x, [(weight, None)])
    assert len(calls) == 1
    few_row_linears(torch.cat((x, x[:1])), [(weight, None)])
    few_row_linears(x[:, :40], [(weight[:, :40].contiguous(), None)])
    few_row_linears(x, [(weight[:7], None)])
    few_row_linears(x[:, :32], [(weight[:, :32], None)])
    few_row_linears(x.float(), [(weight.float(), None)])
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    few_row_linears(x, [(weight, None)])
    assert len(calls) == 1


def test_shapes_that_do_not_fit_are_told() -> None:
    x = torch.randn(3, 64)
    for weight, bias in ((torch.randn(8, 32), None), (torch.randn(8, 64), torch.randn(4)), (torch.randn(64), None)):
        with pytest.raises(ValueError, match="do not fit together"):
            few_row_linears(x, [(weight, bias)])
