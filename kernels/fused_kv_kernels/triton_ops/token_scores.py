"""Token scores in Triton: the attention mass that each key receives, in two passes over the keys.

The first pass computes each row's softmax denominator, the second adds up each key's share of every row. The scores of
a block stay in registers; no matrix of rows and keys is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import block_dim, multiprocessors, score_blocks
from .packed_rows import packed_rows, query_rows
from .products import key_scores, precision, sink_weight, weight_factors
from .splits import choose_splits

if TYPE_CHECKING:
    from fused_kv_kernels.scoring import Scoring

__all__ = ["token_scores"]


@triton.jit(do_not_specialize=["rows", "keys", "splits"])
def _denominator_kernel(
    q, k, levels, q_positions, first_keys, stride_ql, stride_qh, stride_qr, stride_kl, stride_kh, stride_kn,
    rows, keys, kv_heads, splits, scale, cap,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOWS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the base-two log-sum-exp of one block of packed rows over one split of the keys."""
    layer, kv_head, row, head = packed_rows(tl.program_id(0) * BLOCK_M, kv_heads, GROUP, BLOCK_M)
    split = tl.program_id(2)
    dims = tl.arange(0, BLOCK_D)
    is_row = row < rows
    positions = tl.load(q_positions + row, mask=is_row, other=-1).to(tl.int32)
    end = tl.minimum(tl.max(positions) + 1, keys)
    low = 0
    if HAS_WINDOWS:
        firsts = tl.load(first_keys + row, mask=is_row, other=2147483647).to(tl.int32)
        low = tl.minimum(tl.min(firsts), end) // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(end - low, BLOCK_N), splits) * BLOCK_N
    start = low + split * span
    end = tl.minimum(start + span, end)

    q_at = query_rows(q, stride_ql, stride_qh, stride_qr, layer, head, row) + dims[None, :]
    queries = tl.load(q_at, mask=is_row[:, None] & (dims < D)[None, :], other=0.0)
    columns = tl.arange(0, BLOCK_N)
    k_at = k + layer * stride_kl + kv_head * stride_kh + start.to(tl.int64) * stride_kn
    k_inside = columns[:, None] * stride_kn + dims[None, :]
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for begin in range(start, end, BLOCK_N):
        column = begin + columns
        readable = (column < end)[:, None] & (dims < D)[None, :]
        keys_block = tl.load(k_at + k_inside, mask=readable, other=0.0)
        scores = key_scores(queries, keys_block, scale, cap, CAPPED, PRECISION)
        seen = (column[None, :] <= positions[:, None]) & (column < end)[None, :]
        if HAS_WINDOWS:
            seen &= column[None, :] >= firsts[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        peak = new_peak
        k_at += BLOCK_N * stride_kn
    level = tl.where(total != 0.0, peak + tl.log2(tl.where(total != 0.0, total, 1.0)), float("-inf"))
    layers = tl.num_programs(1) // kv_heads
    at = ((split.to(tl.int64) * layers + layer) * kv_heads * GROUP + head) * rows + row
    tl.store(levels + at, level, mask=is_row)


@triton.jit(do_not_specialize=["rows", "keys", "splits"])
def _mass_kernel(
    q, k, levels, q_positions, first_keys, sinks, mass,
    stride_ql, stride_qh, stride_qr, stride_kl, stride_kh, stride_kn, rows, keys, kv_heads, splits, scale, cap,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOWS: tl.constexpr, HAS_SINKS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum one block of keys' shares of all rows of one key head."""
    layer = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    layers = tl.num_programs(1) // kv_heads
    dims = tl.arange(0, BLOCK_D)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    readable = (column < keys)[:, None] & (dims < D)[None, :]
    k_at = k + layer * stride_kl + kv_head * stride_kh + column.to(tl.int64)[:, None] * stride_kn + dims[None, :]
    keys_block = tl.load(k_at, mask=readable, other=0.0)
    shares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for begin in range(0, rows * GROUP, BLOCK_M):
        packed = begin + tl.arange(0, BLOCK_M)
        row = packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        is_row = row < rows
        positions = tl.load(q_positions + row, mask=is_row, other=-1).to(tl.int32)
        q_at = query_rows(q, stride_ql, stride_qh, stride_qr, layer, head, row) + dims[None, :]
        queries = tl.load(q_at, mask=is_row[:, None] & (dims < D)[None, :], other=0.0)
        # Each split's share of the denominator: there are few, and reading them costs less than one more launch.
        at = (layer * kv_heads * GROUP + head) * rows + row
        peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for split in range(0, splits):
            level = tl.load(levels + at + split * layers * kv_heads * GROUP * rows, mask=is_row, other=float("-inf"))
            new_peak = tl.maximum(peak, level)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            total = total * tl.exp2(peak - base) + tl.exp2(level - base)
            peak = new_peak
        whole = total
        if HAS_SINKS:
            whole += sink_weight(tl.load(sinks + head, mask=is_row, other=0.0), peak)
        level = tl.where(total != 0.0, peak + tl.log2(tl.where(total != 0.0, whole, 1.0)), 0.0)
        scores = key_scores(queries, keys_block, scale, cap, CAPPED, PRECISION)
        seen = (column[None, :] <= positions[:, None]) & (column < keys)[None, :]
        if HAS_WINDOWS:
            seen &= column[None, :] >= tl.load(first_keys + row, mask=is_row, other=2147483647)[:, None]
        shares += tl.sum(tl.where(seen, tl.exp2(scores - level[:, None]), 0.0), 0)
    tl.store(mass + (layer * kv_heads + kv_head) * keys + column, shares, mask=column < keys)


def token_scores(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    scoring: Scoring,
    first_keys: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Score every key by the attention mass it receives from the query rows.

    Parameters
    ----------
    q : Tensor
        ``[L, Hq, R, D]``, last stride 1.
    k : Tensor
        ``[L, Hkv, N, D]``, last stride 1.
    q_positions : Tensor
        Integers ``[R]``.
    scoring : Scoring
        Of a positive scale.
    first_keys : Tensor, optional
        Integers ``[R]``: where the rows' windows begin.
    splits : int, optional
        Programs among which the first pass splits the keys; chosen from the sizes without it.

    Returns
    -------
    Tensor
        float32 ``[N]``: mean over rows, heads and layers. Equal in every run: nothing is added atomically.
    """
    q_positions = q_positions.contiguous()
    first_keys = None if first_keys is None else first_keys.contiguous()
    sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    layers, q_heads, rows, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = q_heads // kv_heads
    if keys == 0 or rows == 0:
        return torch.zeros(keys, dtype=torch.float32, device=q.device)
    shape = score_blocks(q.dtype, dim)
    blocks = triton.cdiv(rows * group, shape["BLOCK_M"])
    if splits is None:
        splits = choose_splits(blocks * layers * kv_heads, keys, multiprocessors(q.device))
    levels = torch.empty((splits, layers, q_heads, rows), dtype=torch.float32, device=q.device)
    mass = torch.empty((layers, kv_heads, keys), dtype=torch.float32, device=q.device)
    sizes = (*q.stride()[:3], *k.stride()[:3], rows, keys, kv_heads, splits, *weight_factors(scoring))
    meta = {"GROUP": group, "D": dim, "BLOCK_D": block_dim(dim), "PRECISION": precision(q.dtype), **shape}
    meta |= {"HAS_WINDOWS": first_keys is not None, "CAPPED": scoring.softcap is not None}
    _denominator_kernel[(blocks, layers * kv_heads, splits)](q, k, levels, q_positions, first_keys, *sizes, **meta)
    grid = (triton.cdiv(keys, shape["BLOCK_N"]), layers * kv_heads)
    _mass_kernel[grid](q, k, levels, q_positions, first_keys, sinks, mass, *sizes, HAS_SINKS=sinks is not None, **meta)
    return mass.sum(dim=(0, 1)) / (layers * q_heads * rows)
