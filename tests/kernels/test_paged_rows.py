"""Row attention over pages: shared chunks, exclusive pages, decoding; against gathering and against plain attention."""

from __future__ import annotations

import pytest
import torch
from tolerance import TOLERANCE, assert_near

from fused_kv_kernels import PageTable, SharedPages, paged_row_attention, rerotate_keys, rotation_table
from fused_kv_kernels.reference import row_attention_reference
from fused_kv_kernels.reference_paged import paged_row_attention_reference

PAGE = 16


def _inv_freq(rotary: int) -> torch.Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))


def _pool(dim: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(2, 12, kv_heads, PAGE, dim, generator=torch.Generator().manual_seed(3)).to(device, dtype)


def _table(rotary: int, device: torch.device) -> PageTable:
    """Two requests that share the chunk of pages 1, 2, 3 at different places; the second has one chunk more."""
    chunk_a = [SharedPages([1, 2, 3], 40, start=start, delta=start - 7) for start in (5, 60)]
    chunk_b = SharedPages([4], 9, start=20, delta=13)
    return PageTable([[chunk_a[0]], [chunk_b, chunk_a[1]]], [[6, 7], [8]], PAGE, _inv_freq(rotary), device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "rotary"),
    [(4, 2, 64, 64), (7, 1, 128, 128), (2, 2, 80, 80), (4, 1, 96, 32)],
    ids=["gqa_2", "gqa_7_dim_128", "mha_dim_80", "partial_rotary"],
)
def test_equals_reference(
    q_heads: int, kv_heads: int, dim: int, rotary: int, dtype: torch.dtype, device: torch.device
) -> None:
    pool, table = _pool(dim, kv_heads, dtype, device), _table(rotary, device)
    table.take(0, [6, 30, 45, 46])
    table.take(1, [20, 61, 99, 100])
    positions = torch.tensor([[6, 30, 45, 46], [20, 61, 99, 100]], device=device)
    q = torch.randn(2, q_heads, 4, dim, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    out, lse = paged_row_attention(q, *pool, table, positions, dim**-0.5)
    want, want_lse = paged_row_attention_reference(q.float(), *pool.float(), table, positions, dim**-0.5)
    assert_near(out, want, dtype)
    assert_near(lse, want_lse, dtype)


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("rows", [1, 40])
def test_decoding_and_many_rows_over_splits(rows: int, splits: int, device: torch.device) -> None:
    from fused_kv_kernels.triton_ops import paged_rows as in_triton

    pool, table = _pool(64, 1, torch.float32, device), _table(64, device)
    positions = torch.arange(200, 200 + rows, device=device) if rows == 1 else torch.arange(0, 2 * rows, 2).to(device)
    q = torch.randn(2, 4, rows, 64, generator=torch.Generator().manual_seed(5)).to(device)
    out, lse = in_triton.paged_rows(q, *pool, table, positions, 0.125, splits=splits)
    want, want_lse = paged_row_attention_reference(q, *pool, table, positions, 0.125)
    assert_near(out, want, torch.float32)
    assert_near(lse, want_lse, torch.float32)


def test_a_request_is_what_it_would_be_alone(device: torch.device) -> None:
    """Pages of shared chunks, rotated, plus recomputed tokens give plain attention over the fused KV, row by row."""
    dim, start, tokens = 64, 30, 40
    pool, inv_freq = _pool(dim, 1, torch.float32, device), _inv_freq(dim)
    table = PageTable([[SharedPages([1, 2, 3], tokens, start, start)]], [[6, 7, 8, 9]], PAGE, inv_freq, device)
    chunk = pool[:, 1:4].transpose(1, 2).reshape(2, 1, 48, dim)[:, :, :tokens]
    turn = rotation_table(torch.full((tokens,), start), inv_freq).to(device)
    fused = torch.zeros(2, 1, 75, dim, device=device)
    fused[0, :, start : start + tokens] = rerotate_keys(chunk[0], turn)
    fused[1, :, start : start + tokens] = chunk[1]
    # A header, two recomputed tokens of the chunk, and the question.
    rows = [*range(start), 36, 55, *range(70, 75)]
    fresh = torch.randn(2, 1, len(rows), dim, generator=torch.Generator().manual_seed(6)).to(device)
    fused[:, :, rows] = fresh
    places = table.take(0, rows)
    for part, new in zip(pool, fresh, strict=True):
        part[places[:, 0], :, places[:, 1]] = new.transpose(0, 1)
    positions = torch.tensor(rows, device=device)
    q = torch.randn(1, 2, len(rows), dim, generator=torch.Generator().manual_seed(7)).to(device)
    got, _ = paged_row_attention(q, *pool, table, positions, 0.125)
    assert_near(got, row_attention_reference(q, *fused[:, None], positions, 0.125), torch.float32)
    decoded = torch.randn(2, 1, 1, dim, generator=torch.Generator().manual_seed(8)).to(device)
    ((page, slot),) = table.take(0, [75]).tolist()
    pool[:, page, :, slot] = decoded[:, :, 0]
    got, _ = paged_row_attention(q[:, :, :1], *pool, table, torch.tensor([75], device=device), 0.125)
    longer = torch.cat((fused, decoded), dim=2)[:, None]
    assert_near(
        got, row_attention_reference(q[:, :, :1], *longer, torch.tensor([75], device=device), 0.125), torch.float32
    )


def test_stale_entries_do_not_matter(device: torch.device) -> None:
    """What a request recomputes hides the shared entry for it alone; the shared pages are untouched."""
    pool, table = _pool(64, 1, torch.float32, device), _table(64, device)
    table.take(0, [5])
    q, positions = torch.randn(2, 1, 1, 64, device=device), torch.tensor([120], device=device)
    before, _ = paged_row_attention(q, *pool, table, positions, 0.125)
    pool[:, 1, :, 0] = float("nan")
    after, _ = paged_row_attention(q, *pool, table, positions, 0.125)
    assert torch.equal(before[0], after[0])
    assert after[1].isnan().all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="power of two"):
        PageTable([[]], [[0]], 24, _inv_freq(64))
    with pytest.raises(ValueError, match="does not fit"):
        PageTable([[SharedPages([1], 17, 0, 0)]], [[0]], 16, _inv_freq(64))
    table = PageTable([[]], [[0]], 16, _inv_freq(64))
    with pytest.raises(ValueError, match="16 free slots for 17"):
        table.take(0, range(17))
    pool = torch.zeros(2, 3, 1, 32, 64)
    with pytest.raises(ValueError, match="do not fit together"):
        paged_row_attention(torch.zeros(1, 1, 1, 64), *pool, table, torch.tensor([0]), 1.0)
