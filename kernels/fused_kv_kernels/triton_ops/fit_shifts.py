"""Inner products of deviations and shifts in Triton: one program sums over the tokens of a chunk and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import key_value_blocks
from .shift_chunks import layer_parts

if TYPE_CHECKING:
    from fused_kv_kernels.shift_chunks import ShiftStack
    from fused_kv_kernels.transfer import TransferPlan

__all__ = ["fit_shifts"]

_COLUMNS = 8
_BLOCK_T = 32


@triton.jit
def _moved(fresh, stored, dims, mask):
    new = tl.load(fresh + dims, mask=mask, other=0.0).to(tl.float32)
    return new - tl.load(stored + dims, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _fit_kernel(
    table, bounds, selected, fresh_rows, cos, sin, fresh_k, fresh_v, layer_k, layer_v, out,
    stride_fkh, stride_fkt, stride_fvh, stride_fvt, stride_lkh, stride_lkt, stride_lvh, stride_lvt,
    COLUMNS: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Sum the products of one chunk's and head's deviations with their shifts, and of the shifts with themselves."""
    shift = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    entry = table + shift * COLUMNS
    rows, first_row, start = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 7)
    change_k = tl.load(entry).to(tl.pointer_type(tl.int8))
    scales_k = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    change_v = tl.load(entry + 2).to(tl.pointer_type(tl.int8))
    scales_v = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
    pairs, dims = tl.arange(0, BLOCK_HALF)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    x_at = pairs * 2 if INTERLEAVED else pairs
    y_at = x_at + 1 if INTERLEAVED else x_at + HALF
    turn_x = tl.load(cos + shift * HALF + pairs, mask=pairs < HALF, other=1.0)
    turn_y = tl.load(sin + shift * HALF + pairs, mask=pairs < HALF, other=0.0)
    last = tl.load(bounds + 2 * shift + 1)
    along_k, square_k, along_v, square_v = 0.0, 0.0, 0.0, 0.0
    for block in range(tl.load(bounds + 2 * shift), last, BLOCK_T):
        at = block + tl.arange(0, BLOCK_T)
        is_row = at < last
        position = tl.load(selected + at, mask=is_row, other=0)
        row = tl.load(fresh_rows + at, mask=is_row, other=0)[:, None]
        source = head * rows + first_row + tl.where(is_row, position - start, 0)
        # The grid has as many heads as there are of keys or of values: the other may have fewer.
        of_keys, of_values = at < tl.where(head < KEY_HEADS, last, 0), at < tl.where(head < VALUE_HEADS, last, 0)
        scale_k = tl.load(scales_k + source, mask=of_keys, other=0.0)[:, None]
        scale_v = tl.load(scales_v + source, mask=of_values, other=0.0)[:, None]
        source, position, of_keys, of_values = source[:, None], position[:, None], of_keys[:, None], of_values[:, None]
        in_values, inside = of_values & (dims < DV), of_keys & (pairs < HALF)

        moved = _moved(
            fresh_v + head * stride_fvh + row * stride_fvt, layer_v + head * stride_lvh + position * stride_lvt, dims,
            in_values,
        )  # fmt: skip
        change = tl.load(change_v + source * DV + dims, mask=in_values, other=0).to(tl.float32) * scale_v
        along_v += tl.sum(moved * change)
        square_v += tl.sum(change * change)

        fresh, stored = fresh_k + head * stride_fkh + row * stride_fkt, layer_k + head * stride_lkh
        stored += position * stride_lkt
        x = tl.load(change_k + source * D + x_at, mask=inside, other=0).to(tl.float32) * scale_k
        y = tl.load(change_k + source * D + y_at, mask=inside, other=0).to(tl.float32) * scale_k
        along_k += tl.sum(_moved(fresh, stored, x_at, inside) * (x * turn_x - y * turn_y))
        along_k += tl.sum(_moved(fresh, stored, y_at, inside) * (y * turn_x + x * turn_y))
        square_k += tl.sum(x * x + y * y)
        if REST > 0:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            in_rest = of_keys & (rest < D)
            kept = tl.load(change_k + source * D + rest, mask=in_rest, other=0).to(tl.float32) * scale_k
            along_k += tl.sum(_moved(fresh, stored, rest, in_rest) * kept)
            square_k += tl.sum(kept * kept)
    found = out + (shift * tl.num_programs(1) + head) * 4
    tl.store(found, along_k)
    tl.store(found + 1, square_k)
    tl.store(found + 2, along_v)
    tl.store(found + 3, square_v)


def fit_shifts(
    plan: TransferPlan,
    stack: ShiftStack,
    layer_idx: int,
    bounds: Tensor,
    fresh: tuple[Tensor, Tensor],
    layer: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the sums that :func:`fused_kv_kernels.fit_shifts` needs, float32 ``[len(stack.shifts), heads, 4]``.

    Parameters
    ----------
    bounds : Tensor
        int64 ``[len(stack.shifts), 2]``: each shift's part of the plan's selected positions.
    """
    device = layer[0].device
    heads = max(part.shape[0] for part in layer)
    turns = stack.tables[layer_idx]
    parts, entries = layer_parts(stack, layer_idx, device)
    table = torch.tensor(entries, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    out = torch.empty((len(parts), heads, 4), dtype=torch.float32, device=device)
    strides = [stride for part in (*fresh, *layer) for stride in part.stride()[:2]]
    _fit_kernel[(len(parts), heads)](
        table, bounds.contiguous(), plan.selected.contiguous(), plan.fresh_rows.contiguous(), turns.cos, turns.sin,
        *fresh, *layer, out, *strides,
        COLUMNS=_COLUMNS, **key_value_blocks(*layer, turns), BLOCK_T=_BLOCK_T, num_warps=4,
    )  # fmt: skip
    return out
