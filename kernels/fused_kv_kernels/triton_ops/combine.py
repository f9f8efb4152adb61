"""Joining the partial attention results of programs that each took a part of the keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configs import block_dim
from .products import sink_weight

__all__ = ["combine"]

_BLOCK_R = 4


@triton.jit(do_not_specialize=["rows", "total_rows", "splits"])
def _combine_kernel(
    part_out, part_lse, out, lse, sinks, stride_ob, stride_oh, stride_or, heads, rows, total_rows, splits,
    HAS_SINKS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Weigh each split's rows by its share of the softmax denominator."""
    index = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    is_row = index < total_rows
    inside = is_row[:, None] & (dims < D)[None, :]
    peak = tl.full((BLOCK_R,), float("-inf"), dtype=tl.float32)
    for split in range(0, splits):
        level = tl.load(part_lse + split * total_rows + index, mask=is_row, other=float("-inf"))
        peak = tl.maximum(peak, level)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    acc = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for split in range(0, splits):
        level = tl.load(part_lse + split * total_rows + index, mask=is_row, other=float("-inf"))
        weight = tl.exp2((level - base) * 1.4426950408889634)
        part = tl.load(part_out + (split * total_rows + index)[:, None] * D + dims[None, :], mask=inside, other=0.0)
        acc += part * weight[:, None]
        total += weight
    sees = total != 0.0
    safe = tl.where(sees, total, 1.0)
    row = index % rows
    head = index // rows % heads
    batch = index // rows // heads
    whole = safe
    if HAS_SINKS:
        whole += sink_weight(tl.load(sinks + head, mask=is_row, other=0.0), base * 1.4426950408889634)
    out_at = out + (batch * stride_ob + head * stride_oh + row * stride_or)[:, None] + dims[None, :]
    tl.store(out_at, (acc / whole[:, None]).to(out.dtype.element_ty), mask=inside)
    level = tl.where(sees, base + tl.log2(safe) * 0.6931471805599453, float("-inf"))
    tl.store(lse + index, level, mask=is_row)


def combine(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> None:
    """Join attention over splits of the keys into `out` and `lse`.

    Parameters
    ----------
    part_out : Tensor
        float32 ``[S, B, Hq, R, D]``, contiguous: each split's own softmax average.
    part_lse : Tensor
        float32 ``[S, B, Hq, R]``, contiguous: each split's log-sum-exp, minus infinity where it saw no key.
    out : Tensor
        ``[B, Hq, R, D]``, last stride 1; written.
    lse : Tensor
        float32 ``[B, Hq, R]``, contiguous; written.
    sinks : Tensor, optional
        float32 ``[Hq]``, contiguous: what each head's denominator has besides; not in `lse`.
    """
    splits, batch, heads, rows, dim = part_out.shape
    total_rows = batch * heads * rows
    _combine_kernel[(triton.cdiv(total_rows, _BLOCK_R),)](
        part_out, part_lse, out, lse, sinks, *out.stride()[:3], heads, rows, total_rows, splits,
        HAS_SINKS=sinks is not None, D=dim, BLOCK_D=block_dim(dim), BLOCK_R=_BLOCK_R, num_warps=4,
    )  # fmt: skip
