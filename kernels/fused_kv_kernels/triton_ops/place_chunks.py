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
from .kv_rows import pair_columns, turn

if TYPE_CHECKING:
    from fused_kv_kernels.rotate import RotationTable

__all__ = ["place_chunks"]

_COLUMNS = 11
_BLOCK_T = 32


@triton.jit
def _source(entry, column, head, SOURCE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where a head's rows of one chunk begin: keys in the table's first column, values in its second."""
    source, stride = tl.load(entry + column).to(tl.pointer_type(SOURCE)), tl.load(entry + 6 + column)
    if ALIGNED:
        # What comes out of memory is aligned to nothing, as far as the compiler knows: loads would be narrow.
        source, stride = tl.multiple_of(source, 16), tl.multiple_of(stride, 16)
    return source + head * stride


@triton.jit
def _scales(entry, column, head):
    """Return where the scales of a head's keys or values begin."""
    return tl.load(entry + 2 + column).to(tl.pointer_type(tl.float16)) + head * tl.load(entry + 8 + column)


@triton.jit
def _place_values(
    entry, source, rows, head, token, is_token, DV: tl.constexpr, BLOCK_DV: tl.constexpr, SCALED: tl.constexpr
):
    """Place values, whose scales are of tokens."""
    dims = tl.arange(0, BLOCK_DV)[None, :]
    inside = is_token & (dims < DV)
    values = tl.load(source + token * DV + dims, mask=inside, other=0).to(tl.float32)
    if SCALED:
        values *= tl.load(_scales(entry, 1, head) + token, mask=is_token, other=0.0).to(tl.float32)
    tl.store(rows + dims, values.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _columns(source, scales, at, is_column, is_token, SCALED: tl.constexpr):
    """Return some columns of keys, whose scales are of dimensions, in float32."""
    keys = tl.load(source + at[None, :], mask=is_token & is_column[None, :], other=0).to(tl.float32)
    if SCALED:
        keys *= tl.load(scales + at, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return keys


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
    token = ((tl.program_id(0) - tl.load(entry + 10)) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    tokens, target = tl.load(entry + 4), tl.load(entry + 5) + token
    # The grid has as many heads as there are of keys or of values: the other may have fewer.
    is_key, is_value = token < tl.where(head < KEY_HEADS, tokens, 0), token < tl.where(head < VALUE_HEADS, tokens, 0)

    value_rows = layer_v + head * stride_lvh + target * stride_lvn
    values = _source(entry, 1, head, SOURCE, ALIGNED)
    _place_values(entry, values, value_rows, head, token, is_value, DV, BLOCK_DV, SCALED)

    rows = layer_k + head * stride_lkh + target * stride_lkn
    keys, scales = _source(entry, 0, head, SOURCE, ALIGNED) + token * D, _scales(entry, 0, head)
    pairs = tl.arange(0, BLOCK_HALF)
    is_pair = pairs < tl.where(head < KEY_HEADS, HALF, 0)
    x_at, y_at = pair_columns(pairs, HALF, INTERLEAVED)
    x, y = turn(
        _columns(keys, scales, x_at, is_pair, is_key, SCALED),
        _columns(keys, scales, y_at, is_pair, is_key, SCALED),
        tl.load(cos + chunk * HALF + pairs, mask=is_pair, other=1.0)[None, :],
        tl.load(sin + chunk * HALF + pairs, mask=is_pair, other=0.0)[None, :],
    )
    inside = is_key & is_pair[None, :]
    tl.store(rows + x_at[None, :], x.to(layer_k.dtype.element_ty), mask=inside)
    tl.store(rows + y_at[None, :], y.to(layer_k.dtype.element_ty), mask=inside)
    if REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        is_rest = rest < tl.where(head < KEY_HEADS, D, 0)
        kept = _columns(keys, scales, rest, is_rest, is_key, SCALED)
        tl.store(rows + rest[None, :], kept.to(layer_k.dtype.element_ty), mask=is_key & is_rest[None, :])


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
