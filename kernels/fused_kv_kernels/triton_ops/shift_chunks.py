"""Context shifts in Triton: eight-bit differences are dequantised, rotated and added, a layer at a time.

As in :mod:`.place_chunks`, a small table holds the addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import key_value_blocks
from .kv_rows import add_to, pair_columns, turn

if TYPE_CHECKING:
    from fused_kv_kernels.shift_chunks import ShiftStack

__all__ = ["shift_chunks"]

_COLUMNS = 9
_BLOCK_T = 32


@triton.jit(do_not_specialize=["shifts"])
def _shift_kernel(
    table, shifts, weights, cos, sin, layer_k, layer_v, stride_lkh, stride_lkt, stride_lvh, stride_lvt,
    COLUMNS: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Shift one block of one chunk's tokens of one head."""
    shift = tl.load(table + shifts * COLUMNS + tl.program_id(0))
    head = tl.program_id(1).to(tl.int64)
    entry = table + shift * COLUMNS
    rows, first = tl.load(entry + 4), tl.load(entry + 5)
    token = (tl.program_id(0) - tl.load(entry + 8)) * BLOCK_T + tl.arange(0, BLOCK_T)
    tokens = tl.load(entry + 6)
    source = head * rows + first + token
    # The grid has as many heads as there are of keys or of values: the other may have fewer.
    of_keys = token < tl.where(head < KEY_HEADS, tokens, 0)
    of_values = token < tl.where(head < VALUE_HEADS, tokens, 0)
    scale_k = tl.load(tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + source, mask=of_keys, other=0.0)
    scale_v = tl.load(tl.load(entry + 3).to(tl.pointer_type(tl.float32)) + source, mask=of_values, other=0.0)
    scale_k = (tl.load(weights + shift) * scale_k)[:, None]
    scale_v = (tl.load(weights + shifts + shift) * scale_v)[:, None]
    change_k = tl.load(entry).to(tl.pointer_type(tl.int8)) + source[:, None] * D
    change_v = tl.load(entry + 2).to(tl.pointer_type(tl.int8)) + source[:, None] * DV
    target = (tl.load(entry + 7) + token)[:, None]
    of_keys = of_keys[:, None]

    dims = tl.arange(0, BLOCK_DV)[None, :]
    in_values = of_values[:, None] & (dims < DV)
    value_at = layer_v + head * stride_lvh + target * stride_lvt + dims
    add_to(value_at, tl.load(change_v + dims, mask=in_values, other=0).to(tl.float32) * scale_v, in_values)

    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    x_at, y_at = pair_columns(pairs, HALF, INTERLEAVED)
    inside = of_keys & (pairs < HALF)
    key_at = layer_k + head * stride_lkh + target * stride_lkt
    x = tl.load(change_k + x_at, mask=inside, other=0).to(tl.float32) * scale_k
    y = tl.load(change_k + y_at, mask=inside, other=0).to(tl.float32) * scale_k
    turn_x = tl.load(cos + shift * HALF + pairs, mask=pairs < HALF, other=1.0)
    turn_y = tl.load(sin + shift * HALF + pairs, mask=pairs < HALF, other=0.0)
    x, y = turn(x, y, turn_x, turn_y)
    add_to(key_at + x_at, x, inside)
    add_to(key_at + y_at, y, inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        in_rest = of_keys & (rest < D)
        add_to(key_at + rest, tl.load(change_k + rest, mask=in_rest, other=0).to(tl.float32) * scale_k, in_rest)


def shift_chunks(stack: ShiftStack, layer_idx: int, layer_keys: Tensor, layer_values: Tensor) -> None:
    """Add the shifts of several chunks to one layer in place; see :func:`fused_kv_kernels.shift_chunks`.

    The layer's bytes are copied to the device where they are not there; they are dequantised on it.
    """
    device = layer_keys.device
    turns = stack.tables[layer_idx]
    # Held until the launch: a table of addresses keeps nothing alive.
    parts = [
        [part[layer_idx].to(device, non_blocking=True).contiguous() for part in (*shift.keys, *shift.values)]
        for shift in stack.shifts
    ]
    rows: list[int] = []
    shift_of: list[int] = []
    for index, (shift, layer) in enumerate(zip(stack.shifts, parts, strict=True)):
        rows += [*(part.data_ptr() for part in layer), layer[0].shape[1]]
        rows += [shift.inside.start, shift.num_tokens, shift.start, len(shift_of)]
        shift_of += [index] * triton.cdiv(shift.num_tokens, _BLOCK_T)
    if not shift_of:
        return
    table = torch.tensor([*rows, *shift_of], pin_memory=device.type == "cuda").to(device, non_blocking=True)
    _shift_kernel[(len(shift_of), max(layer_keys.shape[0], layer_values.shape[0]))](
        table, len(parts), stack.weights, turns.cos, turns.sin, layer_keys, layer_values,
        *layer_keys.stride()[:2], *layer_values.stride()[:2],
        COLUMNS=_COLUMNS, **key_value_blocks(layer_keys, layer_values, turns), BLOCK_T=_BLOCK_T, num_warps=4,
    )  # fmt: skip
