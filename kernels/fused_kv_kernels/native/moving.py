"""The native CPU operators that move stored KV, as functions of tensors. Callers check shapes and positions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .library import int64_array, kept_array, loaded_library, num_threads

if TYPE_CHECKING:
    from fused_kv_kernels.rotate import RotationTable
    from fused_kv_kernels.shift_chunks import ChunkShift
    from fused_kv_kernels.transfer import TransferPlan

__all__ = [
    "Table",
    "chunk_table",
    "int8_chunk_table",
    "native_add_change",
    "native_place_chunks",
    "native_shift_chunks",
    "native_transfer",
    "shift_table",
]

Pair = tuple[Tensor, Tensor]

Table = ctypes.Array[ctypes.c_int64]
"""Numbers and addresses, as the operators take what does not change from layer to layer."""


def _layer(layer_keys: Tensor, layer_values: Tensor, table: RotationTable) -> tuple[int, int, Table]:
    """Return how the operators that rotate into a layer of a cache take it."""
    (key_heads, _, key_dim), (value_heads, _, value_dim) = layer_keys.shape, layer_values.shape
    heads = (layer_keys.stride(0), layer_values.stride(0), key_heads, value_heads)
    shape = (*heads, key_dim, value_dim, table.half, int(table.interleaved), num_threads())
    return layer_keys.data_ptr(), layer_values.data_ptr(), kept_array(shape)


def chunk_table(chunks: Sequence[tuple[Tensor, Tensor]], starts: Sequence[int]) -> Table:
    """Return how :func:`native_place_chunks` takes keys and values ``[L, H, T, D]``; they must outlive it."""
    flat = [
        number
        for (keys, values), start in zip(chunks, starts, strict=True)
        for number in (
            keys.data_ptr(), values.data_ptr(), *keys.stride()[:2], *values.stride()[:2], keys.shape[2], start,
        )
    ]  # fmt: skip
    return int64_array(*flat)


def int8_chunk_table(
    chunks: Sequence[tuple[Tensor, Tensor]], scales: Sequence[tuple[Tensor, Tensor]], starts: Sequence[int]
) -> Table:
    """Return how :func:`native_place_chunks` takes int8 ``[L, H, T, D]`` and their scales; they must outlive it."""
    flat: list[int] = []
    for pair, factors, start in zip(chunks, scales, starts, strict=True):
        tensors = (*pair, *factors)
        flat += [tensor.data_ptr() for tensor in tensors]
        flat += [step for tensor in tensors for step in tensor.stride()[:2]]
        flat += [pair[0].shape[2], start]
    return int64_array(*flat)


def native_place_chunks(
    entries: Table, count: int, layer: int, table: RotationTable, layer_keys: Tensor, layer_values: Tensor,
    *, int8: bool = False,
) -> None:  # fmt: skip
    """Rotate and copy one layer of `count` chunks into a cache, as :func:`fused_kv_kernels.place_chunks` does.

    The entries are those of :func:`chunk_table`, or of :func:`int8_chunk_table`.
    """
    library = loaded_library(layer_keys.dtype)
    place = library.fkv_place_int8_chunks if int8 else library.fkv_place_chunks
    angles = table.cos.data_ptr(), table.sin.data_ptr()
    place(entries, count, layer, *angles, *_layer(layer_keys, layer_values, table))


def native_transfer(
    plan: TransferPlan,
    table: RotationTable,
    fresh_keys: Tensor,
    fresh_values: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
    totals: Pair | None = None,
) -> None:
    """Correct one layer in place, as :func:`fused_kv_kernels.transfer_deviation` does; the totals are dense."""
    fresh_rows, selected, bounds, spans = (
        part.to(torch.int64).contiguous() for part in (plan.fresh_rows, plan.selected, plan.bounds, plan.spans)
    )
    weights = plan.weights.to(torch.float32).contiguous()
    loaded_library(layer_keys.dtype).fkv_transfer(
        fresh_keys.data_ptr(),
        fresh_values.data_ptr(),
        int64_array(*fresh_keys.stride()[:2], *fresh_values.stride()[:2]),
        fresh_rows.data_ptr(),
        selected.data_ptr(),
        bounds.data_ptr(),
        spans.data_ptr(),
        weights.data_ptr(),
        spans.shape[0],
        table.cos.data_ptr(),
        table.sin.data_ptr(),
        *((None, None) if totals is None else (total.data_ptr() for total in totals)),
        *_layer(layer_keys, layer_values, table),
    )


def shift_table(shifts: Sequence[ChunkShift]) -> Table:
    """Return how :func:`native_shift_chunks` takes shifts; their tensors must outlive it."""
    flat: list[int] = []
    for shift in shifts:
        first = shift.inside.start
        for whole, scale in (shift.keys, shift.values):
            flat += [whole.data_ptr() + first * whole.shape[3], scale.data_ptr() + first * scale.element_size()]
        flat += [shift.keys[0].shape[2], shift.num_tokens, shift.start]
    return int64_array(*flat)


def native_shift_chunks(
    entries: Table, layer: int, weights: Tensor, table: RotationTable, layer_keys: Tensor, layer_values: Tensor
) -> None:
    """Add one layer of shifts to a cache, as :func:`fused_kv_kernels.shift_chunks` does; weights float32 [2, count]."""
    loaded_library(layer_keys.dtype).fkv_shift_chunks(
        entries,
        weights.shape[1],
        layer,
        weights.data_ptr(),
        table.cos.data_ptr(),
        table.sin.data_ptr(),
        *_layer(layer_keys, layer_values, table),
    )


def native_add_change(
    sums: Tensor, after: Tensor, before: Tensor, weight: float, table: RotationTable | None, *, is_first: bool
) -> None:
    """Do what :func:`fused_kv_kernels.add_change` does, for layers that rotate alike; rows are dense."""
    layers, heads, rows, dim = after.shape
    half, interleaved = (0, False) if table is None else (table.half, table.interleaved)
    shape = layers, heads, rows, dim, *after.stride()[:2], *before.stride()[:2], half, int(interleaved)
    loaded_library(after.dtype).fkv_add_change(
        after.data_ptr(),
        before.data_ptr(),
        sums.data_ptr(),
        *((None, None) if table is None else (table.cos.data_ptr(), table.sin.data_ptr())),
        int64_array(*shape),
        weight,
        int(before.dtype == torch.float32),
        int(is_first),
        num_threads(),
    )
