"""Row attention in Triton: FusionRAG section 4.3's Q-Sparse-Attn.

Rows are packed (:mod:`.packed_rows`) and ascend in position: keys up to the first row's position need no mask, and keys
after the last row's position or before the first row's window are not read. Where there are too few blocks to fill the
device, the keys are split among programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .combine import combine
from .configs import FEW_ROWS, block_dim, few_rows, many_rows, multiprocessors, prune, row_block
from .packed_rows import (
    empty_results,
    no_softmax,
    packed_rows,
    query_rows,
    result_rows,
    softmax_step,
    split_results,
    store_rows,
)
from .products import key_scores, precision, sink_weight, weight_factors
from .splits import choose_splits

if TYPE_CHECKING:
    from fused_kv_kernels.scoring import Scoring

__all__ = ["row_attention"]


@triton.jit
def _row_positions(positions):
    """Return rows' positions in 32 bits. Those of keys that no row may see are larger than any of them."""
    return tl.minimum(positions, 2147483646).to(tl.int32)


@triton.jit
def _whole_rows(at, dims, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of keys or values that are all there."""
    if BLOCK == WIDTH:
        return tl.load(at)
    return tl.load(at, mask=(dims < WIDTH)[None, :], other=0.0)


@triton.jit
def _key_range(begin, first, end, splits, IS_MASKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where the keys of this program's split begin, where those begin that need a mask, and where they end."""
    low = begin // BLOCK_N * BLOCK_N
    unmasked = low if IS_MASKED else tl.minimum(first + 1, end) // BLOCK_N * BLOCK_N
    span = tl.cdiv(tl.cdiv(end - low, BLOCK_N), splits) * BLOCK_N
    start = low + tl.program_id(2) * span
    end = tl.minimum(start + span, end)
    return start, tl.maximum(tl.minimum(unmasked, end), start), end


@triton.jit
def _attend_whole(
    queries, acc, peak, total, k_at, v_at, stride_kn, stride_vn, start, end, scale, cap,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend rows to blocks of keys that they all see; return the running softmax and where the next keys lie."""
    columns, dims, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_inside = columns[:, None] * stride_kn + dims[None, :]
    v_inside = columns[:, None] * stride_vn + value_dims[None, :]
    for _ in range(start, end, BLOCK_N):
        keys = _whole_rows(k_at + k_inside, dims, D, BLOCK_D)
        values = _whole_rows(v_at + v_inside, value_dims, DV, BLOCK_DV)
        scores = key_scores(queries, keys, scale, cap, CAPPED, PRECISION)
        acc, peak, total = softmax_step(acc, peak, total, scores, values, PRECISION, False)
        k_at += BLOCK_N * stride_kn
        v_at += BLOCK_N * stride_vn
    return acc, peak, total, k_at, v_at


@triton.jit
def _attend_masked(
    queries, acc, peak, total, k_at, v_at, stride_kn, stride_vn, start, end, scale, cap,
    positions, last, kv_positions, row_firsts, begin_key,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_KV_POSITIONS: tl.constexpr, HAS_WINDOWS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend rows to blocks of keys that some of them do not see; return the running softmax."""
    columns, dims, value_dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k_inside = columns[:, None] * stride_kn + dims[None, :]
    v_inside = columns[:, None] * stride_vn + value_dims[None, :]
    for begin in range(start, end, BLOCK_N):
        column = begin + columns
        inside = column < end
        if HAS_KV_POSITIONS:
            key_positions = tl.load(kv_positions + column, mask=inside, other=2147483647)
            inside = key_positions <= last
            needed = tl.min(key_positions) <= last
        else:
            key_positions = column
            needed = True
        if HAS_WINDOWS:
            inside &= column >= begin_key
        if needed:
            # What no row of the block may see is not read: it may be anything, and zero times NaN is NaN.
            keys = tl.load(k_at + k_inside, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
            values = tl.load(v_at + v_inside, mask=inside[:, None] & (value_dims < DV)[None, :], other=0.0)
            scores = key_scores(queries, keys, scale, cap, CAPPED, PRECISION)
            seen = (key_positions[None, :] <= positions[:, None]) & inside[None, :]
            if HAS_WINDOWS:
                seen &= column[None, :] >= row_firsts[:, None]
            scores = tl.where(seen, scores, float("-inf"))
            acc, peak, total = softmax_step(acc, peak, total, scores, values, PRECISION, True)
        k_at += BLOCK_N * stride_kn
        v_at += BLOCK_N * stride_vn
    return acc, peak, total


@triton.jit(do_not_specialize=["rows", "keys", "splits", "work"])
def _row_attention_kernel(
    q, k, v, out, lse, q_positions, kv_positions, q_lengths, kv_lengths, first_keys, sinks,
    stride_qb, stride_qh, stride_qr, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_os, stride_ob, stride_oh, stride_or, stride_pb, stride_np,
    rows, keys, kv_heads, splits, scale, cap, work,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_KV_POSITIONS: tl.constexpr, HAS_Q_LENGTHS: tl.constexpr, HAS_KV_LENGTHS: tl.constexpr,
    HAS_WINDOWS: tl.constexpr, HAS_SINKS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend one block of packed rows to one split of the keys."""
    # The last rows see most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, kv_head, row, head = packed_rows(block * BLOCK_M, kv_heads, GROUP, BLOCK_M)
    num_rows = tl.load(q_lengths + batch).to(tl.int32) if HAS_Q_LENGTHS else rows
    num_keys = tl.load(kv_lengths + batch).to(tl.int32) if HAS_KV_LENGTHS else keys

    is_row = row < num_rows
    asking = q_positions + batch * stride_pb
    positions = _row_positions(tl.load(asking + row, mask=is_row, other=-1))
    first_row = block * BLOCK_M // GROUP
    last_row = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, num_rows - 1)
    has_rows = first_row < num_rows
    first = _row_positions(tl.load(asking + first_row, mask=has_rows, other=-1))
    last = _row_positions(tl.load(asking + last_row, mask=has_rows, other=-1))
    row_firsts, begin_key = row, 0
    if HAS_WINDOWS:
        row_firsts = tl.load(first_keys + row, mask=is_row, other=0).to(tl.int32)
        begin_key = tl.load(first_keys + first_row, mask=has_rows, other=0).to(tl.int32)
    end = num_keys if HAS_KV_POSITIONS else tl.minimum(last + 1, num_keys)
    # Windows are narrow: all their blocks are masked, rather than those at both edges only.
    start, unmasked, end = _key_range(
        begin_key, first, tl.where(has_rows, end, 0), splits, HAS_KV_POSITIONS or HAS_WINDOWS, BLOCK_N
    )

    dims = tl.arange(0, BLOCK_D)
    q_at = query_rows(q, stride_qb, stride_qh, stride_qr, batch, head, row) + dims[None, :]
    queries = tl.load(q_at, mask=is_row[:, None] & (dims < D)[None, :], other=0.0)
    acc, peak, total = no_softmax(BLOCK_M, BLOCK_DV)
    # A scalar moves along the keys: a block of moving pointers would take the registers that the sums need.
    k_at = k + batch * stride_kb + kv_head * stride_kh + start.to(tl.int64) * stride_kn
    v_at = v + batch * stride_vb + kv_head * stride_vh + start.to(tl.int64) * stride_vn
    acc, peak, total, k_at, v_at = _attend_whole(
        queries, acc, peak, total, k_at, v_at, stride_kn, stride_vn, start, unmasked, scale, cap,
        D, BLOCK_D, DV, BLOCK_DV, BLOCK_N, CAPPED, PRECISION,
    )  # fmt: skip
    acc, peak, total = _attend_masked(
        queries, acc, peak, total, k_at, v_at, stride_kn, stride_vn, unmasked, end, scale, cap,
        positions, last, kv_positions + batch * stride_np if HAS_KV_POSITIONS else kv_positions, row_firsts, begin_key,
        D, BLOCK_D, DV, BLOCK_DV, BLOCK_N, HAS_KV_POSITIONS, HAS_WINDOWS, CAPPED, PRECISION,
    )  # fmt: skip

    whole = total
    if HAS_SINKS:
        whole += sink_weight(tl.load(sinks + head), peak)
    places = out, lse, stride_os, stride_ob, stride_oh, stride_or
    out_at, lse_at = result_rows(*places, batch, head, row, rows, kv_heads, GROUP)
    value_dims = tl.arange(0, BLOCK_DV)
    store_rows(out_at + value_dims[None, :], lse_at, acc, peak, total, whole, is_row, row < rows, value_dims < DV)


_KEY = ["GROUP", "D", "DV", "BLOCK_M", "HAS_KV_POSITIONS", "HAS_WINDOWS", "CAPPED", "work"]
_prune = {"early_config_prune": prune}
_many = triton.autotune(many_rows(), key=_KEY, prune_configs_by=_prune)(_row_attention_kernel)
_few = triton.autotune(few_rows(), key=_KEY, prune_configs_by=_prune)(_row_attention_kernel)


def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_positions: Tensor,
    scoring: Scoring,
    *,
    first_keys: Tensor | None = None,
    kv_positions: Tensor | None = None,
    q_lengths: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend scattered query rows to whole key/value sequences, causal by true position.

    Nothing is checked here but what a kernel needs; :func:`fused_kv_kernels.batched_row_attention` checks.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``, last stride 1.
    k, v : Tensor
        ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]``, last stride 1.
    q_positions : Tensor
        Integers ``[R]`` or ``[B, R]``, ascending within the first ``q_lengths[b]``.
    scoring : Scoring
        Of a positive scale.
    first_keys : Tensor, optional
        Integers ``[R]``, not descending: where the rows' windows begin; without `kv_positions` and `q_lengths`.
    kv_positions : Tensor, optional
        Integers ``[N]`` or ``[B, N]`` in any order; key ``j`` stands at position ``j`` without it.
    q_lengths, kv_lengths : Tensor, optional
        Integers ``[B]``: rows and keys of each sequence.
    splits : int, optional
        Programs among which the keys are split; chosen from the sizes without it.

    Returns
    -------
    tuple of Tensor
        ``[B, Hq, R, Dv]`` in the dtype of `q`, laid out ``[B, R, Hq, Dv]`` in memory as the output projection reads it,
        and the log-sum-exp of the scores without sinks, float32 ``[B, Hq, R]``. A row that sees no key is zero, its
        log-sum-exp minus infinity; so are rows beyond a sequence's length.
    """
    q_positions = _dense(q_positions)
    if kv_positions is not None:
        # Whoever hides a key may put it at the largest number there is.
        kv_positions = kv_positions.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    extras = kv_positions, q_lengths, kv_lengths, first_keys
    kv_positions, q_lengths, kv_lengths, first_keys = (None if x is None else _dense(x) for x in extras)
    sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
    batch, q_heads, rows, dim = q.shape
    kv_heads, keys, value_dim = k.shape[1], k.shape[2], v.shape[3]
    group = q_heads // kv_heads
    out, lse = empty_results(q, value_dim)
    if out.numel() == 0:
        return out, lse
    packed = rows * group
    is_few = packed <= FEW_ROWS
    block_m = row_block(q.dtype, max(dim, value_dim), packed)
    if splits is None:
        blocks = triton.cdiv(packed, block_m) * batch * kv_heads
        splits = choose_splits(blocks, keys, multiprocessors(q.device))
    part_out, part_lse = split_results(out, lse, splits)
    meta = {"BLOCK_M": block_m} if is_few else {}
    (_few if is_few else _many)[
        lambda config: (triton.cdiv(packed, config["BLOCK_M"]), batch * kv_heads, splits)
    ](
        q, k, v, part_out, part_lse, q_positions, kv_positions, q_lengths, kv_lengths, first_keys, sinks,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *part_out.stride()[:4],
        _batch_stride(q_positions), _batch_stride(kv_positions),
        rows, keys, kv_heads, splits, *weight_factors(scoring), (rows * keys).bit_length() // 3,
        GROUP=group, D=dim, BLOCK_D=block_dim(dim), DV=value_dim, BLOCK_DV=block_dim(value_dim),
        HAS_KV_POSITIONS=kv_positions is not None, HAS_Q_LENGTHS=q_lengths is not None,
        HAS_KV_LENGTHS=kv_lengths is not None, HAS_WINDOWS=first_keys is not None,
        HAS_SINKS=sinks is not None and splits == 1, CAPPED=scoring.softcap is not None,
        PRECISION=precision(q.dtype), **meta,
    )  # fmt: skip
    if splits > 1:
        combine(part_out, part_lse, out, lse, sinks)
    return out, lse


def _dense(positions: Tensor) -> Tensor:
    """Return positions whose last axis can be stepped through one by one."""
    return positions if positions.stride(-1) == 1 else positions.contiguous()


def _batch_stride(positions: Tensor | None) -> int:
    """Return the elements from one sequence's positions to the next; 0 where all share them."""
    return 0 if positions is None or positions.dim() == 1 else int(positions.stride(0))
