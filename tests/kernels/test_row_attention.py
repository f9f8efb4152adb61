"""Row attention against its reference, and the plan's refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import TOLERANCE, assert_near

from fused_kv_kernels import RowPlan, row_attention
from fused_kv_kernels.reference import row_attention_reference


def _case(
    batch: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    num_keys: int,
    rows: list[int],
    dtype: torch.dtype,
    seed: int = 0,
):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, q_heads, len(rows), dim, generator=generator).to(dtype)
    k = torch.randn(batch, kv_heads, num_keys, dim, generator=generator).to(dtype)
    v = torch.randn(batch, kv_heads, num_keys, dim, generator=generator).to(dtype)
    return q, k, v, torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "rows",
    [[0], [299], [0, 299], list(range(300)), list(range(5)), list(range(290, 300)), list(range(0, 300, 7))],
    ids=["first", "last", "ends", "dense", "first_block", "tail", "scattered"],
)
@pytest.mark.parametrize(("q_heads", "kv_heads", "batch"), [(9, 3, 1), (4, 4, 2), (8, 1, 3)])
def test_row_attention_equals_reference(
    dtype: torch.dtype, rows: list[int], q_heads: int, kv_heads: int, batch: int
) -> None:
    q, k, v, positions = _case(batch, q_heads, kv_heads, 64, 300, rows, dtype)
    got = row_attention(q, k, v, RowPlan(positions, 300), 64**-0.5)
    want = row_attention_reference(q.float(), k.float(), v.float(), positions, 64**-0.5)
    assert got.dtype == dtype
    assert_near(got, want, dtype)


@settings(max_examples=40)
@given(
    num_keys=st.integers(1, 200),
    data=st.data(),
    groups=st.sampled_from([1, 2, 3, 7, 16]),
    dim=st.sampled_from([8, 17, 64, 80, 96, 128, 256]),
    block=st.sampled_from([1, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_rows_any_block(
    num_keys: int, data: st.DataObject, groups: int, dim: int, block: int, dtype: torch.dtype
) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, num_keys - 1))))
    q, k, v, positions = _case(1, 2 * groups, 2, dim, num_keys, rows, dtype)
    got = row_attention(q, k, v, RowPlan(positions, num_keys, block), dim**-0.5)
    want = row_attention_reference(q.float(), k.float(), v.float(), positions, dim**-0.5)
    assert_near(got, want, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(9, 9, 64), (32, 2, 128), (4, 2, 256), (6, 3, 80)])
def test_views_of_longer_buffers_and_memory_full_of_nan(
    q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries as a projection leaves them, keys and values in a cache with room, many strips and key blocks."""
    generator = torch.Generator().manual_seed(dim)
    num_keys, num_rows = 700, 331
    q = torch.randn(2, num_rows, q_heads, dim, generator=generator).to(dtype).transpose(1, 2)
    caches = torch.randn(2, 2, kv_heads, num_keys + 90, dim, generator=generator).to(dtype)
    caches[:, :, :, num_keys:] = float("nan")
    k, v = caches[:, :, :, :num_keys]
    positions = torch.randperm(num_keys, generator=generator)[:num_rows].sort().values
    want = row_attention_reference(q.float(), k.float(), v.float(), positions, dim**-0.5)
    real_empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        fresh = real_empty(*args, **kwargs)  # type: ignore[call-overload]
        return fresh.fill_(float("nan") if fresh.is_floating_point() else 255)  # as floats, bytes of 255 are NaN, too

    monkeypatch.setattr(torch, "empty", poisoned)
    got = row_attention(q, k, v, RowPlan(positions, num_keys), dim**-0.5)
    assert_near(got, want, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_number_that_is_none_is_not_lost(dtype: torch.dtype) -> None:
    q, k, v, positions = _case(1, 2, 2, 64, 200, list(range(0, 200, 3)), dtype)
    k[0, 0, 120, 5] = float("nan")
    got = row_attention(q, k, v, RowPlan(positions, 200), 0.125)
    assert got[0, 0, positions >= 120].isnan().all()
    assert got[0, 1].isfinite().all()


def test_keys_after_a_row_are_never_seen() -> None:
    rows = [3, 40, 41, 90]
    q, k, v, positions = _case(1, 3, 1, 16, 100, rows, torch.float32)
    for number, row in enumerate(rows):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, row + 1 :] = 1e3
        v2[:, :, row + 1 :] = float("nan")
        masked_rows = positions[: number + 1]
        got = row_attention(
            q[:, :, : number + 1],
            k2[:, :, : row + 1],
            v2[:, :, : row + 1],
            RowPlan(masked_rows, row + 1),
            0.25,
        )
        want = row_attention(q, k, v, RowPlan(positions, 100), 0.25)[:, :, : number + 1]
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_no_rows_give_an_empty_output() -> None:
    q, k, v, _ = _case(1, 3, 1, 16, 10, [], torch.float32)
    assert row_attention(q, k, v, RowPlan(torch.empty(0, dtype=torch.int64), 10), 1.0).shape == (1, 3, 0, 16)


@pytest.mark.parametrize(
    "rows", [[1, 1], [2, 1], [-1, 3], [3, 10]], ids=["duplicate", "descending", "negative", "beyond"]
)
def test_plan_refuses_positions(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"ascending|outside"):
        RowPlan(torch.tensor(rows), 10)


def test_shapes_must_fit_the_plan() -> None:
    q, k, v, _ = _case(1, 3, 1, 16, 10, [1, 2], torch.float32)
    with pytest.raises(ValueError, match="2 rows and k 10 keys"):
        row_attention(q, k, v, RowPlan(torch.tensor([1]), 10), 1.0)
