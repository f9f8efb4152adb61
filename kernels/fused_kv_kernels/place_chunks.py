"""Placing chunks: copy stored chunk KV into a layer of a cache and rotate the keys to their new positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import UnsupportedOperandsError, triton_op, use_triton
from .native import (
    Table,
    chunk_table,
    int8_chunk_table,
    native_place_chunks,
    supports_int8_rows,
    supports_rows,
)
from .rotate import RotationTable, rotate_in_torch

__all__ = ["ChunkStack", "place_chunks"]

_Pairs = Sequence[tuple[Tensor, Tensor]]


def place_chunks(
    chunks: _Pairs,
    starts: Sequence[int],
    table: RotationTable,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: _Pairs | None = None,
) -> None:
    """Write the KV of several chunks into one layer, each chunk's keys rotated by one distance.

    Parameters
    ----------
    chunks : sequence of (Tensor, Tensor)
        Keys ``[Hk, T, Dk]`` and values ``[Hv, T, Dv]`` of every chunk, all in one floating dtype or int8.
    starts : sequence of int
        Where each chunk begins in the layer.
    table : RotationTable
        A row for each chunk: :func:`fused_kv_kernels.rotation_table` of the chunks' distances.
    layer_keys, layer_values : Tensor
        ``[Hk, N, Dk]`` and ``[Hv, N, Dv]``, written in place.
    scales : sequence of (Tensor, Tensor), optional
        float16 scales of every int8 chunk: of keys ``[Hk, 1, Dk]``, a factor for each channel, and of values
        ``[Hv, T, 1]``, one for each token.

    Raises
    ------
    ValueError
        If a chunk does not fit into the layer where it is to begin.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    if not chunks:
        return
    _check(chunks, starts, table, layer_keys, layer_values, scales)
    if use_triton("chunk placement", layer_keys=layer_keys, layer_values=layer_values):
        _in_triton(chunks, starts, table, layer_keys, layer_values, scales)
        return
    same = scales is not None or all(part.dtype == layer_keys.dtype for pair in chunks for part in pair)
    if same and supports_rows(layer_keys, layer_values):
        entries = _native_table(_of_one_layer(chunks), starts, None if scales is None else _of_one_layer(scales))
        if entries is not None:
            native_place_chunks(entries, len(chunks), 0, table, layer_keys, layer_values, int8=scales is not None)
            return
    _in_torch(chunks, starts, table, layer_keys, layer_values, scales)


class ChunkStack:
    """Several layers of several chunks, to be placed layer by layer.

    What is the same in all layers is worked out once: with tens of chunks that takes as long as placing them.

    Parameters
    ----------
    chunks : sequence of (Tensor, Tensor)
        Keys ``[L, Hk, T, Dk]`` and values ``[L, Hv, T, Dv]`` of every chunk, all in one floating dtype or int8.
    starts : sequence of int
        Where each chunk begins in a layer.
    tables : sequence of RotationTable
        One for each of the ``L`` layers, as :func:`place_chunks` takes them; the same one where layers rotate alike.
    scales : sequence of (Tensor, Tensor), optional
        float16 scales of every int8 chunk: ``[L, Hk, 1, Dk]`` of keys and ``[L, Hv, T, 1]`` of values.

    Raises
    ------
    ValueError
        If there are not as many tables as layers.
    """

    def __init__(
        self,
        chunks: _Pairs,
        starts: Sequence[int],
        tables: Sequence[RotationTable],
        *,
        scales: _Pairs | None = None,
    ) -> None:
        self.chunks, self.starts, self.tables = list(chunks), list(starts), list(tables)
        self.scales = None if scales is None else list(scales)
        self._fits: set[tuple[int, torch.Size, torch.Size]] = set()
        tensors = [part for pair in chunks for part in pair]
        self._dtype = tensors[0].dtype if tensors else None
        layers = {part.shape[0] for pair in self._all() for part in pair}
        if layers and layers != {len(self.tables)}:
            msg = f"a stack of {sorted(layers)} layers needs a rotation table for each (got {len(self.tables)})"
            raise ValueError(msg)
        self._entries = _native_table(self.chunks, starts, scales) if chunks else None

    def place(self, layer: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        """Write layer `layer` of the stack, counted from 0, into a layer of a cache: ``[Hk, N, Dk]``, ``[Hv, N, Dv]``.

        Raises ValueError or IndexError if there is no such layer, or it does not fit.
        """
        if not self.chunks:
            return
        if not 0 <= layer < len(self.tables):
            msg = f"a stack has no layer {layer}: they are counted from 0, and there are {len(self.tables)}"
            raise IndexError(msg)
        table, there = self.tables[layer], (layer_keys, layer_values)
        on_triton = use_triton("chunk placement", layer_keys=layer_keys, layer_values=layer_values)
        fits = (self.scales is not None or layer_keys.dtype == self._dtype) and supports_rows(*there)
        if self._entries is None or on_triton or not fits:
            chunks, scales = self._layer(layer)
            place_chunks(chunks, self.starts, table, *there, scales)
            return
        # Tables of one stack are few, and layers of one shape many.
        shape = id(table), layer_keys.shape, layer_values.shape
        if shape not in self._fits:
            chunks, scales = self._layer(layer)
            _check(chunks, self.starts, table, *there, scales)
            self._fits.add(shape)
        native_place_chunks(self._entries, len(self.chunks), layer, table, *there, int8=self.scales is not None)

    def _all(self) -> _Pairs:
        return [*self.chunks, *(self.scales or ())]

    def _layer(self, layer: int) -> tuple[_Pairs, _Pairs | None]:
        chunks = [(keys[layer], values[layer]) for keys, values in self.chunks]
        return chunks, None if self.scales is None else [(keys[layer], values[layer]) for keys, values in self.scales]


def _of_one_layer(pairs: _Pairs) -> _Pairs:
    return [(keys[None], values[None]) for keys, values in pairs]


def _native_table(chunks: _Pairs, starts: Sequence[int], scales: _Pairs | None) -> Table | None:
    """Return chunks ``[L, H, T, D]`` as the native operators take them; None if they do not."""
    if scales is not None:
        return int8_chunk_table(chunks, scales, starts) if supports_int8_rows(chunks, scales) else None
    rows = [part[0] for pair in chunks for part in pair]
    return chunk_table(chunks, starts) if supports_rows(*rows) else None


def _check(
    chunks: _Pairs,
    starts: Sequence[int],
    table: RotationTable,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: _Pairs | None,
) -> None:
    length = layer_keys.shape[1]
    table_fits = len(table) == len(chunks) and 2 * table.half <= layer_keys.shape[2]
    if layer_values.shape[1] != length or not table_fits or len(starts) != len(chunks):
        msg = (
            f"layers {list(layer_keys.shape)} and {list(layer_values.shape)}, a rotation table "
            f"{list(table.cos.shape)}, {len(starts)} starts and {len(chunks)} chunks do not fit together"
        )
        raise ValueError(msg)
    for pair, start in zip(chunks, starts, strict=True):
        tokens = pair[0].shape[1]
        layer = (layer_keys, layer_values)
        fits = all(part.shape == (x.shape[0], tokens, x.shape[2]) for part, x in zip(pair, layer, strict=True))
        if not fits or start < 0 or start + tokens > length:
            msg = (
                f"a chunk of keys {list(pair[0].shape)} and values {list(pair[1].shape)} does not fit into a layer "
                f"{list(layer_keys.shape)} and {list(layer_values.shape)} at {start}"
            )
            raise ValueError(msg)
    if scales is not None:
        _check_scales(chunks, scales)


def _check_scales(chunks: _Pairs, scales: _Pairs) -> None:
    if len(scales) != len(chunks):
        msg = f"{len(scales)} pairs of scales and {len(chunks)} chunks do not fit together"
        raise ValueError(msg)
    for (keys, values), (key_scale, value_scale) in zip(chunks, scales, strict=True):
        of_keys, of_values = (keys.shape[0], 1, keys.shape[2]), (*values.shape[:2], 1)
        if tuple(key_scale.shape) != of_keys or tuple(value_scale.shape) != of_values:
            msg = (
                f"scales of keys {list(key_scale.shape)} and of values {list(value_scale.shape)} are not those of a "
                f"chunk {list(keys.shape)} and {list(values.shape)}"
            )
            raise ValueError(msg)


def _in_triton(
    chunks: _Pairs,
    starts: Sequence[int],
    table: RotationTable,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: _Pairs | None,
) -> None:
    device = layer_keys.device

    def there(pairs: _Pairs) -> list[tuple[Tensor, Tensor]]:
        return [(a.to(device, non_blocking=True), b.to(device, non_blocking=True)) for a, b in pairs]

    dtypes = {tensor.dtype for pair in chunks for tensor in pair}
    dense = all(t.stride(1) == t.shape[2] and t.stride(2) == 1 for pair in chunks for t in pair)
    if len(dtypes) > 1 or (dtypes == {torch.int8}) != (scales is not None) or not dense:
        msg = f"chunk placement needs chunks of one dtype with dense rows, and scales for int8 (got {dtypes})"
        raise UnsupportedOperandsError(msg)
    for keys, values in scales or ():
        if {keys.dtype, values.dtype} != {torch.float16} or keys.stride(2) != 1 or values.stride(1) != 1:
            msg = f"chunk placement needs dense float16 scales (got {keys.dtype} and {values.dtype})"
            raise UnsupportedOperandsError(msg)
    triton_op("place_chunks", device)(
        there(chunks), starts, table.to(device), layer_keys, layer_values, None if scales is None else there(scales)
    )


def _in_torch(
    chunks: _Pairs,
    starts: Sequence[int],
    table: RotationTable,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: _Pairs | None,
) -> None:
    if scales is not None:
        chunks = [
            (keys.float() * key_scale.float(), values.float() * value_scale.float())
            for (keys, values), (key_scale, value_scale) in zip(chunks, scales, strict=True)
        ]
    # All chunks are rotated in one go: chunk by chunk, dispatching would cost more than rotating.
    lengths = torch.tensor([keys.shape[1] for keys, _ in chunks], device=table.device)
    cos, sin = (part.repeat_interleave(lengths, dim=0) for part in (table.cos, table.sin))
    stored = torch.cat([keys for keys, _ in chunks], dim=1).to(layer_keys.device)
    moved = rotate_in_torch(stored, cos, sin, table.interleaved)
    begin = 0
    for (keys, values), start in zip(chunks, starts, strict=True):
        end = begin + keys.shape[1]
        layer_keys[:, start : start + keys.shape[1]] = moved[:, begin:end]
        layer_values[:, start : start + keys.shape[1]] = values
        begin = end
