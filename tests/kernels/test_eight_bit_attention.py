"""Attention in eight bits against the reference, and where it is something else."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_kv_kernels import (
    RowPlan,
    eight_bit_row_attention,
    has_eight_bit_attention,
    row_attention,
    why_not_native,
)
from fused_kv_kernels.native.processor import processor_features
from fused_kv_kernels.reference import row_attention_reference

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if has_eight_bit_attention(dtype)]
ALL = slice(None)

pytestmark = pytest.mark.usefixtures("byte_instructions")
needs_eight_bits = pytest.mark.skipif(not DTYPES, reason="no native attention in eight bits here")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(heads: int, kv_heads: int, rows: int, keys: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(1, heads, rows, dim), drawn(1, kv_heads, keys, dim, seed=1), drawn(1, kv_heads, keys, dim, seed=2)


def attended(q: Tensor, k: Tensor, v: Tensor, first_keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what eight bits and the reference give the last rows of a sequence."""
    positions = torch.arange(k.shape[2] - q.shape[2], k.shape[2])
    plan = RowPlan(positions, k.shape[2], first_keys=first_keys)
    got = eight_bit_row_attention(q, k, v, plan, q.shape[3] ** -0.5)
    want = row_attention_reference(
        q.float(), k.float(), v.float(), positions, q.shape[3] ** -0.5, first_keys=first_keys
    )
    assert got.dtype == q.dtype
    return got.float(), want


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@needs_eight_bits
@settings(max_examples=60)
@given(
    data=st.data(),
    num_keys=st.integers(1, 300),
    groups=st.sampled_from([1, 2, 3, 7]),
    dims=st.sampled_from([(8, 8), (64, 64), (80, 80), (96, 24), (128, 128), (256, 256), (34, 66)]),
    dtype=st.sampled_from(DTYPES or [torch.float32]),
    has_windows=st.booleans(),
)
def test_any_rows_are_near_the_reference(
    data: st.DataObject, num_keys: int, groups: int, dims: tuple[int, int], dtype: torch.dtype, has_windows: bool
) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1)))
    firsts = None
    if has_windows:
        firsts = torch.tensor(list(accumulate((data.draw(st.integers(0, row)) for row in rows), max)))
        firsts = firsts.minimum(torch.tensor(rows))
    q = drawn(2, 2 * groups, len(rows), dims[0]).to(dtype)
    k, v = (drawn(2, 2, num_keys, dim, seed=seed).to(dtype) for seed, dim in enumerate(dims, 1))
    positions = torch.tensor(rows)
    got = eight_bit_row_attention(q, k, v, RowPlan(positions, num_keys, first_keys=firsts), dims[0] ** -0.5)
    want = row_attention_reference(q.float(), k.float(), v.float(), positions, dims[0] ** -0.5, first_keys=firsts)
    assert error(got.float(), want) < 0.025


@needs_eight_bits
@every_dtype
def test_a_sink_leaves_something_of_the_others(dtype: torch.dtype) -> None:
    """The first key has nearly all the weight and no value: rounded relative to it, all others would be zero."""
    q, k, v = operands(6, 2, 64, 900, 64)
    q[..., 0] = 8.0
    k[..., 0], v[:, :, 0] = 0.0, 0.0
    k[:, :, 0], k[:, :, 0, 0] = 0.0, 14.0
    got, want = attended(q.to(dtype), k.to(dtype), v.to(dtype))
    weight = torch.softmax((q[0, 0] @ k[0, 0].T)[:, : 900 - 64] / 8, dim=-1)
    assert float(weight[:, 0].min()) > 0.99
    assert error(got, want) < 0.06


@needs_eight_bits
@every_dtype
def test_what_all_keys_share_costs_no_precision(dtype: torch.dtype) -> None:
    q, k, v = operands(6, 2, 64, 500, 64)
    k = (k + 20 * drawn(1, 2, 1, 64, seed=3)).to(dtype)
    assert error(*attended(q.to(dtype), k, v.to(dtype))) < 0.06


@needs_eight_bits
@every_dtype
def test_a_query_of_zeros_averages_what_it_sees(dtype: torch.dtype) -> None:
    _, k, v = operands(6, 2, 70, 200, 64)
    first_keys = torch.arange(70) + 60
    got, want = attended(torch.zeros(1, 6, 70, 64, dtype=dtype), k.to(dtype), v.to(dtype), first_keys)
    assert error(got, want) < 0.02


@needs_eight_bits
@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_pass_for_a_number(dtype: torch.dtype, bad: float) -> None:
    for operand in range(3):
        parts = [part.to(dtype) for part in operands(4, 2, 20, 150, 64)]
        parts[operand][0, 1, 9, 5] = bad
        got, _ = attended(*parts)
        seen = got[0, 1, 9] if operand == 0 else got[0, 2:, :, 5 if operand == 2 else ALL]
        assert not torch.isfinite(seen).any()
        assert torch.isfinite(got[0, 0]).all(), "another head"


@needs_eight_bits
@every_dtype
def test_a_key_that_has_no_part_in_the_mean_does_not_pass_for_a_number_either(dtype: torch.dtype) -> None:
    q, k, v = (part.to(dtype) for part in operands(4, 2, 20, 600, 64))
    k[0, 1, 10, 5] = torch.nan
    got, _ = attended(q, k, v)
    assert not torch.isfinite(got[0, 2:]).any()
    assert torch.isfinite(got[0, :2]).all()


@needs_eight_bits
@every_dtype
def test_keys_that_no_row_can_see_are_not_read(dtype: torch.dtype) -> None:
    q, k, v = (part.to(dtype) for part in operands(4, 2, 20, 350, 64))
    positions, first_keys = torch.arange(260, 280), torch.arange(200, 220)
    plan = RowPlan(positions, 350, first_keys=first_keys)
    want = row_attention_reference(q.float(), k.float(), v.float(), positions, 0.125, first_keys=first_keys)
    for keys in (slice(280, None), slice(0, 190)):
        k[:, :, keys], v[:, :, keys] = torch.nan, torch.nan
    # All they see has something in common, which the mean of others would not take away.
    k = (k.float() + 20 * drawn(1, 2, 1, 64, seed=3)).to(dtype)
    assert error(eight_bit_row_attention(q, k, v, plan, 0.125).float(), want) < 0.06


@needs_eight_bits
@every_dtype
def test_large_scores_choose_one_key(dtype: torch.dtype) -> None:
    q, k, v = operands(4, 2, 20, 150, 64)
    got, _ = attended((1e4 * q).to(dtype), (1e4 * k).to(dtype), v.to(dtype))
    assert torch.isfinite(got).all()
    assert float(got.abs().max()) <= float(v.abs().max()) * 1.01


@needs_eight_bits
def test_neither_threads_nor_the_dtype_of_positions_matter() -> None:
    q, k, v = operands(6, 2, 90, 400, 64)
    positions, threads = torch.arange(310, 400), torch.get_num_threads()
    want = eight_bit_row_attention(q, k, v, RowPlan(positions, 400), 0.125)
    first_keys = torch.zeros(90, dtype=torch.int32)
    first_keys[-1] = 1
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            got = eight_bit_row_attention(q, k, v, RowPlan(positions.int(), 400, first_keys=first_keys), 0.125)
            assert torch.equal(got[:, :, :-1], want[:, :, :-1])
    finally:
        torch.set_num_threads(threads)


def test_elsewhere_it_is_row_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands(4, 2, 20, 150, 64)
    plan = RowPlan(torch.arange(130, 150), 150)
    for options in ({"softcap": 3.0}, {"sinks": drawn(4)}):
        got = eight_bit_row_attention(q, k, v, plan, 0.125, **options)
        assert torch.equal(got, row_attention(q, k, v, plan, 0.125, **options))
    for scale in (0.0, -0.125):
        assert torch.equal(eight_bit_row_attention(q, k, v, plan, scale), row_attention(q, k, v, plan, scale))
    few = RowPlan(torch.arange(143, 150), 150)
    got = eight_bit_row_attention(q[:, :, :7], k, v, few, 0.125)
    assert torch.equal(got, row_attention(q[:, :, :7], k, v, few, 0.125))
    wide = eight_bit_row_attention(q.double(), k.double(), v.double(), plan, 0.125)
    assert torch.equal(wide, row_attention(q.double(), k.double(), v.double(), plan, 0.125))
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    assert not has_eight_bit_attention(torch.float32)
    assert torch.equal(eight_bit_row_attention(q, k, v, plan, 0.125), row_attention(q, k, v, plan, 0.125))


def test_operands_that_do_not_fit_together_are_refused() -> None:
    q, k, v = operands(4, 2, 20, 150, 64)
    with pytest.raises(ValueError, match="the plan was made for 19 rows"):
        eight_bit_row_attention(q, k, v, RowPlan(torch.arange(19), 150), 0.125)
    with pytest.raises(ValueError, match="do not fit together"):
        eight_bit_row_attention(q, k, v[:, :, :-1], RowPlan(torch.arange(20), 150), 0.125)


def test_a_processor_with_the_instructions_has_the_operator(byte_instructions: str) -> None:
    features = processor_features()
    for dtype in (torch.float32, torch.bfloat16):
        on_avx2 = "avx512f" not in features or (byte_instructions == "avx2" and dtype == torch.float32)
        has_instructions = on_avx2 or {"avx512_vnni", "avx512vbmi"} <= features
        is_faster = dtype == torch.float32 or "amx_bf16" not in processor_features()
        assert has_eight_bit_attention(dtype) == (has_instructions and is_faster and why_not_native(dtype) is None)
