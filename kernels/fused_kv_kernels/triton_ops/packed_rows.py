"""Packed rows and their running softmax: what kernels that attend rows to keys have in common.

The query heads that share a key head are packed into the rows of one block, so that keys are loaded once for all of
them. Where keys are split among programs, each split writes results of its own, which :mod:`.combine` joins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .products import dot

__all__ = [
    "empty_results",
    "no_softmax",
    "packed_rows",
    "query_rows",
    "result_rows",
    "softmax_step",
    "split_results",
    "store_rows",
]


@triton.jit
def packed_rows(first, kv_heads, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the sequence and key head of this program, and the row and query head of each packed row of a block."""
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    packed = first + tl.arange(0, BLOCK_M)
    return batch, kv_head, packed // GROUP, kv_head * GROUP + packed % GROUP


@triton.jit
def query_rows(q, stride_qb, stride_qh, stride_qr, batch, head, row):
    """Return where each packed row of queries begins."""
    return q + batch * stride_qb + head[:, None] * stride_qh + row.to(tl.int64)[:, None] * stride_qr


@triton.jit
def no_softmax(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Return the sums, peaks and totals of a running softmax over nothing."""
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    return tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32), peak, tl.zeros((BLOCK_M,), dtype=tl.float32)


@triton.jit
def softmax_step(acc, peak, total, scores, values, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """Fold one block of scores (base two, minus infinity where unseen) into the running softmax."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet has no peak to subtract.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    return dot(weights.to(values.dtype), values, acc, PRECISION), new_peak, total


@triton.jit
def result_rows(
    out, lse, stride_os, stride_ob, stride_oh, stride_or, batch, head, row, rows, kv_heads, GROUP: tl.constexpr
):
    """Return where the results of each packed row begin, and where its log-sum-exp lies, for this program's split."""
    split = tl.program_id(2).to(tl.int64)
    out_at = out + split * stride_os + batch * stride_ob + head[:, None] * stride_oh
    sequences = tl.num_programs(1) // kv_heads
    lse_at = lse + ((split * sequences + batch) * kv_heads * GROUP + head) * rows + row
    return out_at + row.to(tl.int64)[:, None] * stride_or, lse_at


@triton.jit
def store_rows(out_at, lse_at, acc, peak, total, whole, is_row, is_output, is_dim):
    """Write the averages of values and the log-sum-exp; zero and minus infinity for rows that have seen nothing.

    `whole` is `total` and what a denominator has besides.
    """
    sees = is_row & (total != 0.0)
    result = tl.where(sees[:, None], acc / tl.where(sees, whole, 1.0)[:, None], 0.0)
    tl.store(out_at, result.to(out_at.dtype.element_ty), mask=is_output[:, None] & is_dim[None, :])
    level = tl.where(sees, (peak + tl.log2(tl.where(sees, total, 1.0))) * 0.6931471805599453, float("-inf"))
    tl.store(lse_at, level, mask=is_output)


def empty_results(q: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return room for what attention gives.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``.
    value_dim : int
        ``Dv``.

    Returns
    -------
    tuple of Tensor
        ``[B, Hq, R, Dv]`` in the dtype of `q`, laid out ``[B, R, Hq, Dv]`` in memory as the output projection reads it,
        and float32 ``[B, Hq, R]``.
    """
    batch, heads, rows, _ = q.shape
    out = torch.empty((batch, rows, heads, value_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    return out, torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)


def split_results(out: Tensor, lse: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Return room for the results of each split, ``[S, ...]``: that of the whole where there is only one."""
    if splits == 1:
        return out[None], lse[None]
    shapes = (splits, *out.shape), (splits, *lse.shape)
    part_out, part_lse = (torch.empty(shape, dtype=torch.float32, device=out.device) for shape in shapes)
    return part_out, part_lse
