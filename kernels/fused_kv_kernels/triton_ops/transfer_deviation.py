"""Deviation transfer in Triton: one launch sums the chunks' deviations, a second adds the means to the chunks' tokens.

The chunk of a position is looked up on the device, so the host does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import key_value_blocks
from .kv_rows import add_to, pair_columns, turn, turn_back

if TYPE_CHECKING:
    from fused_kv_kernels.rotate import RotationTable
    from fused_kv_kernels.transfer import TransferPlan

__all__ = ["transfer_deviation"]

_BLOCK_T = 16


@triton.jit
def _gap(fresh, stored, fresh_at, stored_at, columns, inside):
    """Return how far fresh rows are from stored ones in some of their columns."""
    new = tl.load(fresh + fresh_at + columns, mask=inside, other=0.0).to(tl.float32)
    return new - tl.load(stored + stored_at + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sum_kernel(
    fresh_k, fresh_v, layer_k, layer_v, fresh_rows, selected, bounds, weights, cos, sin, sums,
    stride_fkh, stride_fkt, stride_fvh, stride_fvt, stride_lkh, stride_lkt, stride_lvh, stride_lvt,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Sum one chunk's weighted deviations in one head: keys turned to position zero, and values."""
    chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(bounds + chunk), tl.load(bounds + chunk + 1)
    fresh_k += head * stride_fkh
    fresh_v += head * stride_fvh
    layer_k += head * stride_lkh
    layer_v += head * stride_lvh
    pairs = tl.arange(0, BLOCK_HALF)
    dims = tl.arange(0, BLOCK_DV)
    x_at, y_at = pair_columns(pairs, HALF, INTERLEAVED)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    sum_x = tl.zeros((BLOCK_HALF,), dtype=tl.float32)
    sum_y = tl.zeros((BLOCK_HALF,), dtype=tl.float32)
    sum_rest = tl.zeros((BLOCK_REST,), dtype=tl.float32)
    sum_v = tl.zeros((BLOCK_DV,), dtype=tl.float32)
    for first in range(begin, end, BLOCK_T):
        index = first + tl.arange(0, BLOCK_T)
        is_token = index < end
        at = tl.load(selected + index, mask=is_token, other=0)[:, None]
        row = tl.load(fresh_rows + index, mask=is_token, other=0)[:, None]
        # The grid has as many heads as there are of keys or of values: the other may have fewer.
        of_keys, of_values = index < tl.where(head < KEY_HEADS, end, 0), index < tl.where(head < VALUE_HEADS, end, 0)
        inside = of_keys[:, None] & (pairs < HALF)[None, :]
        x = _gap(fresh_k, layer_k, row * stride_fkt, at * stride_lkt, x_at[None, :], inside)
        y = _gap(fresh_k, layer_k, row * stride_fkt, at * stride_lkt, y_at[None, :], inside)
        turn_x = tl.load(cos + at * HALF + pairs[None, :], mask=inside, other=1.0)
        turn_y = tl.load(sin + at * HALF + pairs[None, :], mask=inside, other=0.0)
        x, y = turn_back(x, y, turn_x, turn_y)
        sum_x += tl.sum(x, 0)
        sum_y += tl.sum(y, 0)
        if REST > 0:
            in_rest = of_keys[:, None] & (rest < D)[None, :]
            sum_rest += tl.sum(_gap(fresh_k, layer_k, row * stride_fkt, at * stride_lkt, rest[None, :], in_rest), 0)
        in_values = of_values[:, None] & (dims < DV)[None, :]
        sum_v += tl.sum(_gap(fresh_v, layer_v, row * stride_fvt, at * stride_lvt, dims[None, :], in_values), 0)
    weight = tl.load(weights + chunk)
    out = sums + (chunk * tl.num_programs(1) + head) * (D + DV)
    tl.store(out + x_at, sum_x * weight, mask=pairs < HALF)
    tl.store(out + y_at, sum_y * weight, mask=pairs < HALF)
    if REST > 0:
        tl.store(out + rest, sum_rest * weight, mask=rest < D)
    tl.store(out + D + dims, sum_v * weight, mask=dims < DV)


@triton.jit(do_not_specialize=["positions"])
def _add_kernel(
    layer_k, layer_v, chunk_of, cos, sin, sums, stride_lkh, stride_lkt, stride_lvh, stride_lvt, positions,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Add to one block of positions of one head what their chunks have summed up."""
    head = tl.program_id(1).to(tl.int64)
    at = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    chunk = tl.load(chunk_of + at, mask=at < positions, other=-1)
    if tl.max(tl.max(chunk, 0), 0) >= 0:
        mine = sums + (chunk * tl.num_programs(1) + head) * (D + DV)
        pairs = tl.arange(0, BLOCK_HALF)[None, :]
        x_at, y_at = pair_columns(pairs, HALF, INTERLEAVED)
        of_keys = chunk >= tl.where(head < KEY_HEADS, 0, 2147483647)
        of_values = chunk >= tl.where(head < VALUE_HEADS, 0, 2147483647)
        inside = of_keys & (pairs < HALF)
        x = tl.load(mine + x_at, mask=inside, other=0.0)
        y = tl.load(mine + y_at, mask=inside, other=0.0)
        turn_x = tl.load(cos + at * HALF + pairs, mask=inside, other=1.0)
        turn_y = tl.load(sin + at * HALF + pairs, mask=inside, other=0.0)
        key = layer_k + head * stride_lkh + at * stride_lkt
        x, y = turn(x, y, turn_x, turn_y)
        add_to(key + x_at, x, inside)
        add_to(key + y_at, y, inside)
        if REST > 0:
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            in_rest = of_keys & (rest < D)
            add_to(key + rest, tl.load(mine + rest, mask=in_rest, other=0.0), in_rest)
        dims = tl.arange(0, BLOCK_DV)[None, :]
        in_values = of_values & (dims < DV)
        value = layer_v + head * stride_lvh + at * stride_lvt
        add_to(value + dims, tl.load(mine + D + dims, mask=in_values, other=0.0), in_values)


def transfer_deviation(
    plan: TransferPlan,
    table: RotationTable,
    fresh_keys: Tensor,
    fresh_values: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
) -> None:
    """Correct one layer in place; see :func:`fused_kv_kernels.transfer_deviation`."""
    heads = max(layer_keys.shape[0], layer_values.shape[0])
    chunks, positions = plan.spans.shape[0], len(table)
    if chunks == 0 or plan.selected.shape[0] == 0:
        return
    width = layer_keys.shape[2] + layer_values.shape[2]
    sums = torch.empty((chunks, heads, width), dtype=torch.float32, device=layer_keys.device)
    meta = {**key_value_blocks(layer_keys, layer_values, table), "BLOCK_T": _BLOCK_T, "num_warps": 4}
    strides = (*layer_keys.stride()[:2], *layer_values.stride()[:2])
    _sum_kernel[(chunks, heads)](
        fresh_keys, fresh_values, layer_keys, layer_values, plan.fresh_rows.contiguous(), plan.selected.contiguous(),
        plan.bounds, plan.weights.contiguous(), table.cos, table.sin, sums,
        *fresh_keys.stride()[:2], *fresh_values.stride()[:2], *strides, **meta,
    )  # fmt: skip
    _add_kernel[(triton.cdiv(positions, _BLOCK_T), heads)](
        layer_keys, layer_values, _chunk_of(plan.spans, positions), table.cos, table.sin, sums, *strides, positions,
        **meta,
    )  # fmt: skip


def _chunk_of(spans: Tensor, positions: int) -> Tensor:
    """Return which chunk every position belongs to, int64 ``[N]``; -1 for none."""
    at = torch.arange(positions, device=spans.device)
    chunk = torch.searchsorted(spans[:, 0].contiguous(), at, right=True) - 1
    return chunk.masked_fill(at >= spans[chunk.clamp(min=0), 1], -1)
