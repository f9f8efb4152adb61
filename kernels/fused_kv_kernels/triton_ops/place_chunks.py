"""Placing chunks in Triton: dequantise, rotate and scatter the KV of all chunks of a layer in one pass.

The chunks may lie anywhere on the device. A small table holds their addresses, so one launch serves all of them, and
every byte is read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import key_value_blocks

if TYPE_CHECKING:
    from fused_kv_kernels.rotate import RotationTable

__all__ = ["place_chunks"]

_COLUMNS = 11
_BLOCK_T = 32


@triton.jit
def _turn(x, y, cos, sin):
    """Rotate pairs of dimensions."""
    return x * cos[None, :] - y * sin[None, :], y * cos[None, :] + x * sin[None, :]


@triton.jit(do_not_specialize=["chunks"])
def _place_kernel(
    table, chunks, cos, sin, layer_k, layer_v, stride_lkh, stride_lkn, stride_lvh, stride_lvn,
    SOURCE: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    REST: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Place one block of one chunk's tokens of one head."""
    chunk = tl.load(table + chunks * COLUMNS + tl.program_id(0))
    head = tl.program_id(1).to(tl.int64)
    entry = table + chunk * COLUMNS
    source_k = tl.load(entry).to(tl.pointer_type(SOURCE))
    source_v = tl.load(entry + 1).to(tl.pointer_type(SOURCE))
    stride_k, stride_v = tl.load(entry + 6), tl.load(entry + 7)
    if ALIGNED:
        # What comes out of memory is aligned to nothing, as far as the compiler knows: loads would be narrow.
        source_k, source_v = tl.multiple_of(source_k, 16), tl.multiple_of(source_v, 16)
        stride_k, stride_v = tl.multiple_of(stride_k, 16), tl.multiple_of(stride_v, 16)
    source_k += head * stride_k
    source_v += head * stride_v
    first_block = tl.load(entry + 10)
    token = ((tl.program_id(0) - first_block) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    tokens = tl.load(entry + 4)
    # The grid has as many heads as there are of keys or of values: the other may have fewer.
    key_tokens, value_tokens = tl.where(head < KEY_HEADS, tokens, 0), tl.where(head < VALUE_HEADS, tokens, 0)
    target = tl.load(entry + 5) + token
    layer_k += head * stride_lkh
    layer_v += head * stride_lvh

    dims = tl.arange(0, BLOCK_DV)[None, :]
    in_values = (token < value_tokens) & (dims < DV)
    values = tl.load(source_v + token * DV + dims, mask=in_values, other=0).to(tl.float32)
    if SCALED:
        scale_v = tl.load(entry + 3).to(tl.pointer_type(tl.float16)) + head * tl.load(entry + 9)
        values *= tl.load(scale_v + token, mask=token < value_tokens, other=0.0).to(tl.float32)
    tl.store(layer_v + target * stride_lvn + dims, values.to(layer_v.dtype.element_ty), mask=in_values)

    is_token = token < key_tokens
    pairs = tl.arange(0, BLOCK_HALF)
    is_pair = pairs < tl.where(head < KEY_HEADS, HALF, 0)
    x_at = pairs * 2 if INTERLEAVED else pairs
    y_at = x_at + 1 if INTERLEAVED else x_at + HALF
    inside = is_token & is_pair[None, :]
    x = tl.load(source_k + token * D + x_at[None, :], mask=inside, other=0).to(tl.float32)
    y = tl.load(source_k + token * D + y_at[None, :], mask=inside, other=0).to(tl.float32)
    if SCALED:
        scale_k = tl.load(entry + 2).to(tl.pointer_type(tl.float16)) + head * tl.load(entry + 8)
        x *= tl.load(scale_k + x_at, mask=is_pair, other=0.0).to(tl.float32)[None, :]
        y *= tl.load(scale_k + y_at, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    turn_x = tl.load(cos + chunk * HALF + pairs, mask=is_pair, other=1.0)
    turn_y = tl.load(sin + chunk * HALF + pairs, mask=is_pair, other=0.0)
    x, y = _turn(x, y, turn_x, turn_y)
    row = layer_k + target * stride_lkn
    tl.store(row + x_at[None, :], x.to(layer_k.dtype.element_ty), mask=inside)
    tl.store(row + y_at[None, :], y.to(layer_k.dtype.element_ty), mask=inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        inside_rest = is_token & (rest < D)[None, :]
        kept = tl.load(source_k + token * D + rest[None, :], mask=inside_rest, other=0).to(tl.float32)
        if SCALED:
            kept *= tl.load(scale_k + rest, mask=rest < tl.where(head < KEY_HEADS, D, 0), other=0.0).to(tl.float32)[
                None, :
            ]
        tl.store(row + rest[None, :], kept.to(layer_k.dtype.element_ty), mask=inside_rest)


_SOURCES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8}


def place_chunks(
    chunks: Sequence[tuple[Tensor, Tensor]],
    starts: Sequence[int],
    table: RotationTable,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Write the KV of several chunks into one layer; see :func:`fused_kv_kernels.place_chunks`.

    Everything must lie on one device, chunks have one dtype and dense rows.
    """
    device = layer_keys.device
    entries, total, aligned = _table(chunks, starts, scales, pin=device.type == "cuda")
    if total == 0:
        return
    _place_kernel[(total, max(layer_keys.shape[0], layer_values.shape[0]))](
        entries.to(device, non_blocking=True), len(chunks), table.cos, table.sin,
        layer_keys, layer_values, *layer_keys.stride()[:2], *layer_values.stride()[:2],
        SOURCE=_SOURCES[chunks[0][0].dtype], COLUMNS=_COLUMNS, ALIGNED=aligned, SCALED=scales is not None,
        **key_value_blocks(layer_keys, layer_values, table), BLOCK_T=_BLOCK_T, num_warps=4,
    )  # fmt: skip


def _table(
    chunks: Sequence[tuple[Tensor, Tensor]],
    starts: Sequence[int],
    scales: Sequence[tuple[Tensor, Tensor]] | None,
    pin: bool,
) -> tuple[Tensor, int, bool]:
    """Return a row for each chunk and then the chunk of each block, how many blocks, and whether loads may be wide.

    A row holds the addresses of keys, values and their scales, tokens, start, the strides of the heads of all four,
    and the chunk's first block. From pinned memory it travels beside the computation.
    """
    rows: list[tuple[int, ...]] = []
    chunk_of: list[int] = []
    for index, ((keys, values), start) in enumerate(zip(chunks, starts, strict=True)):
        pair = () if scales is None else scales[index]
        addresses = [x.data_ptr() for x in pair] or [0, 0]
        strides = [x.stride(0) for x in pair] or [0, 0]
        tokens = keys.shape[1]
        sides = (keys.stride(0), values.stride(0), *strides, len(chunk_of))
        rows.append((keys.data_ptr(), values.data_ptr(), *addresses, tokens, start, *sides))
        chunk_of += [index] * triton.cdiv(tokens, _BLOCK_T)
    aligned = all(row[at] % 16 == 0 for row in rows for at in (0, 1, 6, 7))
    cells = torch.tensor([*(cell for row in rows for cell in row), *chunk_of], pin_memory=pin)
    return cells, len(chunk_of), aligned
