"""Norm, rotary positions and MLP gate against transformers' own formulas, bit by bit where no sum is involved.

In float32, where every step of those rounds, norm and gate are held to the exact result instead.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fused_kv_kernels import gated_silu, rms_norm, rotate_rows_

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.sampled_from([1, 3, 16, 33, 64, 576])


def _ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference in units of the last place of `got`."""
    gap = (got.double() - want.double()).abs() / want.double().abs().clamp_min(1e-6)
    return float(gap.max()) / torch.finfo(got.dtype).eps


@settings(max_examples=40)
@given(rows=st.integers(0, 40), dim=SIZES, dtype=DTYPES, seed=st.integers(0, 99))
def test_norm(rows: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, rows, dim, generator=generator) * 5).to(dtype)
    norm = LlamaRMSNorm(dim, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(dim, generator=generator).to(dtype)
    with torch.inference_mode():
        got, want = rms_norm(x, norm.weight, 1e-5), norm(x)
    assert got.dtype == dtype
    assert got.shape == want.shape
    if dtype == torch.float32:
        # transformers' result is itself up to 2.3 units from the exact one, in another direction: not what to be near.
        wide = x.double()
        want = norm.weight.detach().double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    # Otherwise the order of the sum may move the result to the neighbouring number.
    assert rows == 0 or _ulps(got, want) <= 2


@settings(max_examples=40)
@given(rows=st.integers(0, 40), width=SIZES, packed=st.booleans(), dtype=DTYPES, seed=st.integers(0, 99))
def test_gate(rows: int, width: int, packed: bool, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    both = (torch.randn(1, rows, 2 * width, generator=generator) * 20).to(dtype)
    gate, up = both.chunk(2, dim=-1)
    if not packed:
        gate, up = gate.contiguous(), up.contiguous()
    got, want = gated_silu(gate, up), silu(gate) * up
    assert got.dtype == dtype
    assert got.shape == want.shape
    if dtype == torch.float32:
        want = silu(gate.double()) * up.double()
    assert rows == 0 or _ulps(got, want) <= 2


def test_gate_of_extreme_numbers() -> None:
    gate = torch.tensor([[-3e38, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 3e38]] * 2).bfloat16()
    up = torch.ones_like(gate)
    torch.testing.assert_close(gated_silu(gate, up), silu(gate), atol=1e-30, rtol=1e-2)


@settings(max_examples=40)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 4),
    rows=st.integers(0, 30),
    dims=st.sampled_from([(2, 2), (16, 8), (64, 64), (80, 32), (96, 96)]),
    shared=st.booleans(),
    dtype=DTYPES,
)
def test_rotation(batch: int, heads: int, rows: int, dims: tuple[int, int], shared: bool, dtype: torch.dtype) -> None:
    dim, rotary = dims
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(batch, rows, heads, dim, generator=generator).to(dtype).transpose(1, 2)
    angles = torch.randn(1 if shared else batch, rows, rotary // 2, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    want = x.clone()
    want[..., :rotary] = apply_rotary_pos_emb(x[..., :rotary], x[..., :rotary], cos, sin)[0]
    assert rotate_rows_(x, cos, sin) is x
    assert torch.equal(x, want)


@pytest.mark.parametrize("op", [lambda x: rms_norm(x, x[0], 1e-5), lambda x: gated_silu(x, x)])
def test_columns_that_are_not_dense(op: object) -> None:
    x = torch.randn(8, 8).bfloat16()
    torch.testing.assert_close(op(x.t()), op(x.t().contiguous()), atol=0, rtol=2e-2)  # type: ignore[operator]


@pytest.mark.parametrize("shape", [(1, 4, 16), (3, 5, 16), (1, 5, 64)], ids=["rows", "batch", "too wide"])
def test_tables_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    table = torch.ones(shape).bfloat16()
    with pytest.raises(RuntimeError):
        rotate_rows_(torch.randn(2, 3, 5, 32).bfloat16(), table, table)


def test_tables_cut_from_wider_ones() -> None:
    x, wide = torch.randn(1, 2, 5, 32).bfloat16(), torch.randn(2, 1, 5, 48).bfloat16()
    cos, sin = wide[..., :16]
    want = rotate_rows_(x.clone(), cos.contiguous(), sin.contiguous())
    assert torch.equal(rotate_rows_(x, cos, sin), want)
