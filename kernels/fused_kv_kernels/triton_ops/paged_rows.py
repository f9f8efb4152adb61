"""Row attention over pages in Triton: keys of shared pages are rotated in registers, just before the product.

Half-split rotary pairs are loaded as two half blocks, so rotating needs no exchange between threads. The product is the
sum of the halves' products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from .combine import combine
from .configs import FEW_ROWS, block_dim, multiprocessors, page_blocks
from .kv_rows import turn
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
from .products import dot, precision
from .splits import choose_splits

if TYPE_CHECKING:
    from fused_kv_kernels.pages import PageTable

__all__ = ["paged_rows"]

_LOG2_E = 1.4426950408889634


@triton.jit
def _turned_pairs(k_at, pairs, inside, turn_x, turn_y, HALF: tl.constexpr):
    """Return both halves of a page's rotary pairs, turned, in the page's dtype."""
    x = tl.load(k_at + pairs[None, :], mask=inside, other=0.0)
    y = tl.load(k_at + HALF + pairs[None, :], mask=inside, other=0.0)
    turned_x, turned_y = turn(x.to(tl.float32), y.to(tl.float32), turn_x, turn_y)
    return turned_x.to(x.dtype), turned_y.to(y.dtype)


@triton.jit(do_not_specialize=["rows", "num_pages", "splits"])
def _paged_kernel(
    q, page_k, page_v, out, lse, pages, positions, cos, sin, q_positions,
    stride_qb, stride_qh, stride_qr, stride_kp, stride_kh, stride_kn, stride_vp, stride_vh, stride_vn,
    stride_os, stride_ob, stride_oh, stride_or, stride_pb,
    rows, num_pages, kv_heads, splits, scale_log2,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, SKIP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend one block of packed rows of one request to one split of its pages."""
    batch, kv_head, row, head = packed_rows(tl.program_id(0) * BLOCK_M, kv_heads, GROUP, BLOCK_M)
    is_row = row < rows
    asking = tl.load(q_positions + batch * stride_pb + row, mask=is_row, other=-1)
    last = tl.max(asking)

    q_at = query_rows(q, stride_qb, stride_qh, stride_qr, batch, head, row)
    pairs, dims, slots = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_D), tl.arange(0, PAGE)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    is_pair = (pairs < HALF)[None, :]
    query_x = tl.load(q_at + pairs[None, :], mask=is_row[:, None] & is_pair, other=0.0)
    query_y = tl.load(q_at + HALF + pairs[None, :], mask=is_row[:, None] & is_pair, other=0.0)
    query_rest = tl.load(q_at + rest[None, :], mask=is_row[:, None] & (rest < D)[None, :], other=0.0)
    acc, peak, total = no_softmax(BLOCK_M, BLOCK_D)
    nothing = tl.zeros((BLOCK_M, PAGE), dtype=tl.float32)

    share = tl.cdiv(num_pages, splits)
    begin = tl.program_id(2) * share
    for at in range(begin, tl.minimum(begin + share, num_pages)):
        entry = batch * num_pages + at
        stands = tl.load(positions + entry * PAGE + slots)
        is_slot = (stands >= 0) & (stands <= last)
        # In decoding every page is needed; a branch would only keep the next page from being fetched meanwhile.
        needed = tl.max(is_slot.to(tl.int32)) > 0 if SKIP else True
        if needed:
            page = tl.load(pages + entry)
            turn_x = tl.load(cos + entry * HALF + pairs, mask=pairs < HALF, other=1.0)[None, :]
            turn_y = tl.load(sin + entry * HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
            k_at = page_k + page * stride_kp + kv_head * stride_kh + slots[:, None] * stride_kn
            key_x, key_y = _turned_pairs(k_at, pairs, is_slot[:, None] & is_pair, turn_x, turn_y, HALF)
            scores = dot(query_x, tl.trans(key_x), nothing, PRECISION)
            scores = dot(query_y, tl.trans(key_y), scores, PRECISION)
            if REST > 0:
                key_rest = tl.load(k_at + rest[None, :], mask=is_slot[:, None] & (rest < D)[None, :], other=0.0)
                scores = dot(query_rest, tl.trans(key_rest), scores, PRECISION)
            seen = is_slot[None, :] & (stands[None, :] <= asking[:, None])
            scores = tl.where(seen, scores * scale_log2, float("-inf"))
            v_at = page_v + page * stride_vp + kv_head * stride_vh + slots[:, None] * stride_vn + dims[None, :]
            values = tl.load(v_at, mask=is_slot[:, None] & (dims < D)[None, :], other=0.0)
            acc, peak, total = softmax_step(acc, peak, total, scores, values, PRECISION, True)

    places = out, lse, stride_os, stride_ob, stride_oh, stride_or
    out_at, lse_at = result_rows(*places, batch, head, row, rows, kv_heads, GROUP)
    store_rows(out_at + dims[None, :], lse_at, acc, peak, total, total, is_row, is_row, dims < D)


def paged_rows(
    q: Tensor,
    page_keys: Tensor,
    page_values: Tensor,
    table: PageTable,
    q_positions: Tensor,
    scale: float,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each request's rows to its pages; see :func:`fused_kv_kernels.paged_row_attention`.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``, last stride 1.
    page_keys, page_values : Tensor
        ``[pages, Hkv, page_size, D]``, last stride 1.
    table : PageTable
    q_positions : Tensor
        int64 ``[R]`` or ``[B, R]``.
    scale : float
        Multiplies the scores; positive.
    splits : int, optional
        Programs among which the pages are split; chosen from the sizes without it.

    Returns
    -------
    tuple of Tensor
        ``[B, Hq, R, D]``, laid out ``[B, R, Hq, D]`` in memory, and the log-sum-exp, float32 ``[B, Hq, R]``.
    """
    q_positions = q_positions if q_positions.stride(-1) == 1 else q_positions.contiguous()
    batch, q_heads, rows, dim = q.shape
    kv_heads, page_size = page_keys.shape[1], page_keys.shape[2]
    group, half, num_pages = q_heads // kv_heads, table.cos.shape[-1], table.pages.shape[1]
    out, lse = empty_results(q, dim)
    if out.numel() == 0:
        return out, lse
    packed = rows * group
    shape = page_blocks(q.dtype, dim, packed)
    blocks = triton.cdiv(packed, shape["BLOCK_M"])
    if splits is None:
        splits = choose_splits(blocks * batch * kv_heads, num_pages * page_size, multiprocessors(q.device))
    part_out, part_lse = split_results(out, lse, splits)
    rest = dim - 2 * half
    _paged_kernel[(blocks, batch * kv_heads, splits)](
        q, page_keys, page_values, part_out, part_lse, table.pages, table.positions, table.cos, table.sin, q_positions,
        *q.stride()[:3], *page_keys.stride()[:3], *page_values.stride()[:3], *part_out.stride()[:4],
        0 if q_positions.dim() == 1 else q_positions.stride(0),
        rows, num_pages, kv_heads, splits, scale * _LOG2_E,
        GROUP=group, D=dim, BLOCK_D=block_dim(dim), HALF=half, BLOCK_HALF=block_dim(half),
        REST=rest, BLOCK_REST=block_dim(max(rest, 1)), PAGE=page_size, SKIP=packed > FEW_ROWS,
        PRECISION=precision(q.dtype), **shape,
    )  # fmt: skip
    if splits > 1:
        combine(part_out, part_lse, out, lse)
    return out, lse
