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
from .rotate import rotate_in_torch

__all__ = ["ChunkStack", "place_chunks"]

_Pairs = Sequence[tuple[Tensor, Tensor]]


def place_chunks(
    chunks: _Pairs,
    starts: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: _Pairs | None = None,
    interleaved: bool = False,
) -> None:
    """Write the KV of several chunks into one layer, each chunk's keys rotated by one distance.

    Parameters
    ----------
    chunks : sequence of (Tensor, Tensor)
        Keys and values ``[Hkv, T, D]`` of every chunk, all in one floating dtype or int8.
    starts : sequence of int
        Where each chunk begins in the layer.
    cos, sin : Tensor
        float32 ``[len(chunks), rotary / 2]``: :func:`fused_kv_kernels.rotation_tables` of the chunks' distances.
    layer_keys, layer_values : Tensor
        ``[Hkv, N, D]``, written in place.
    scales : sequence of (Tensor, Tensor), optional
        float16 scales of every int8 chunk: of keys ``[Hkv, 1, D]``, a factor for each channel, and of values
        ``[Hkv, T, 1]``, one for each token.
    interleaved : bool
        Whether dimensions ``2 i`` and ``2 i + 1`` form a rotary pair; without it, ``i`` and ``i + rotary / 2`` do.

    Raises
    ------
    ValueError
        If a chunk does not fit into the layer where it is to begin.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    if not chunks:
        return
    _check(chunks, starts, cos, sin, layer_keys, layer_values, scales)
    operands = (chunks, starts, cos, sin, layer_keys, layer_values)
    if use_triton("chunk placement", layer_keys=layer_keys, layer_values=layer_values):
        _in_triton(*operands, scales, interleaved)
        return
    same = scales is not None or all(part.dtype == layer_keys.dtype for pair in chunks for part in pair)
    if not interleaved and same and supports_rows(layer_keys, layer_values):
        table = _native_table(_of_one_layer(chunks), starts, None if scales is None else _of_one_layer(scales))
        if table is not None:
            cos, sin = (part.float().contiguous() for part in (cos, sin))
            native_place_chunks(table, len(chunks), 0, cos, sin, layer_keys, layer_values, int8=scales is not None)
            return
    _in_torch(*operands, scales, interleaved)


class ChunkStack:
    """Several layers of several chunks, to be placed layer by layer.

    What is the same in all layers is worked out once: with tens of chunks that takes as long as placing them.

    Parameters
    ----------
    chunks : sequence of (Tensor, Tensor)
        Keys and values ``[L, Hkv, T, D]`` of every chunk, all in one floating dtype or int8.
    starts : sequence of int
        Where each chunk begins in a layer.
    cos, sin : Tensor
        float32 ``[len(chunks), rotary / 2]``, as :func:`place_chunks` takes them.
    scales : sequence of (Tensor, Tensor), optional
        float16 scales of every int8 chunk: ``[L, Hkv, 1, D]`` of keys and ``[L, Hkv, T, 1]`` of values.
    """

    def __init__(
        self,
        chunks: _Pairs,
        starts: Sequence[int],
        cos: Tensor,
        sin: Tensor,
        *,
        scales: _Pairs | None = None,
    ) -> None:
        self.chunks, self.starts = list(chunks), list(starts)
        self.scales = None if scales is None else list(scales)
        self.cos, self.sin = (table.float().contiguous() for table in (cos, sin))
        self._fits: tuple[int, torch.Size] | None = None
        tensors = [part for pair in chunks for part in pair]
        self._dtype = tensors[0].dtype if tensors else None
        self._table = _native_table(self.chunks, starts, scales) if chunks else None

    def place(self, layer: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        """Write layer `layer` of the stack, counted from 0, into a layer of a cache, ``[Hkv, N, D]`` each.

        Raises ValueError or IndexError if there is no such layer, or it does not fit.
        """
        if layer < 0:
            msg = f"a stack has no layer {layer}: they are counted from 0"
            raise IndexError(msg)
        there = (layer_keys, layer_values)
        on_triton = use_triton("chunk placement", layer_keys=layer_keys, layer_values=layer_values)
        fits = (self.scales is not None or layer_keys.dtype == self._dtype) and supports_rows(*there)
        if self._table is None or on_triton or not fits:
            chunks, scales = self._layer(layer)
            place_chunks(chunks, self.starts, self.cos, self.sin, *there, scales)
            return
        if self._fits is None or layer >= self._fits[0] or not layer_keys.shape == layer_values.shape == self._fits[1]:
            chunks, scales = self._layer(layer)
            _check(chunks, self.starts, self.cos, self.sin, *there, scales)
            self._fits = min(part.shape[0] for pair in self._all() for part in pair), layer_keys.shape
        int8 = self.scales is not None
        native_place_chunks(self._table, len(self.chunks), layer, self.cos, self.sin, *there, int8=int8)

    def _all(self) -> _Pairs:
        return [*self.chunks, *(self.scales or ())]

    def _layer(self, layer: int) -> tuple[_Pairs, _Pairs | None]:
        chunks = [(keys[layer], values[layer]) for keys, values in self.chunks]
        return chunks, None if self.scales is None else [(keys[layer], values[layer]) for keys, values in self.scales]


def _of_one_layer(pairs: _Pairs) -> _Pairs:
    return [(keys[None], values[None]) for keys, values in pairs]


def _native_table(chunks: _Pairs, starts: Sequence[int], scales: _Pairs | None) -> Table | None:
    """Return chunks ``[L, Hkv, T, D]`` as the native operators take them; None if they do not."""
    if scales is not None:
        return int8_chunk_table(chunks, scales, starts) if supports_int8_rows(chunks, scales) else None
    rows = [part[0] for pair in chunks for part in pair]
    return chunk_table(chunks, starts) if supports_rows(*rows) else None


def _check(
    chunks: _Pairs,
    starts: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: _Pairs | None,
) -> None:
    heads, length, dim = layer_keys.shape
    tables_fit = cos.shape == sin.shape and cos.shape[0] == len(chunks) and 2 * cos.shape[1] <= dim
    if layer_keys.shape != layer_values.shape or not tables_fit or len(starts) != len(chunks):
        msg = (
            f"layers {list(layer_keys.shape)} and {list(layer_values.shape)}, tables {list(cos.shape)} and "
            f"{list(sin.shape)}, {len(starts)} starts and {len(chunks)} chunks do not fit together"
        )
        raise ValueError(msg)
    for (keys, values), start in zip(chunks, starts, strict=True):
        fits = keys.shape == values.shape and (keys.shape[0], keys.shape[2]) == (heads, dim)
        if not fits or start < 0 or start + keys.shape[1] > length:
            msg = (
                f"a chunk of keys {list(keys.shape)} and values {list(values.shape)} does not fit into a layer "
                f"{list(layer_keys.shape)} at {start}"
            )
            raise ValueError(msg)
    if scales is not None:
        _check_scales(chunks, scales)


def _check_scales(chunks: _Pairs, scales: _Pairs) -> None:
    if len(scales) != len(chunks):
        msg = f"{len(scales)} pairs of scales and {len(chunks)} chunks do not fit together"
        raise ValueError(msg)
    for (keys, _), (key_scale, value_scale) in zip(chunks, scales, strict=True):
        heads, rows, dim = keys.shape
        if tuple(key_scale.shape) != (heads, 1, dim) or tuple(value_scale.shape) != (heads, rows, 1):
            msg = (
                f"scales of keys {list(key_scale.shape)} and of values {list(value_scale.shape)} are not those of a "
                f"chunk {list(keys.shape)}"
            )
            raise ValueError(msg)


def _in_triton(
    chunks: _Pairs,
    starts: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: _Pairs | None,
    interleaved: bool,
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
    cos, sin = (table.to(device, torch.float32).contiguous() for table in (cos, sin))
    triton_op("place_chunks", device)(
        there(chunks), starts, cos, sin, layer_keys, layer_values,
        None if scales is None else there(scales), interleaved,
    )  # fmt: skip


def _in_torch(
    chunks: _Pairs,
    starts: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
    scales: _Pairs | None,
    interleaved: bool,
) -> None:
    if scales is not None:
        chunks = [
            (keys.float() * key_scale.float(), values.float() * value_scale.float())
            for (keys, values), (key_scale, value_scale) in zip(chunks, scales, strict=True)
        ]
    # All chunks are rotated in one go: chunk by chunk, dispatching would cost more than rotating.
    lengths = torch.tensor([keys.shape[1] for keys, _ in chunks], device=cos.device)
    tables = (cos.repeat_interleave(lengths, dim=0), sin.repeat_interleave(lengths, dim=0))
    moved = rotate_in_torch(torch.cat([keys for keys, _ in chunks], dim=1).to(layer_keys.device), *tables, interleaved)
    begin = 0
    for (keys, values), start in zip(chunks, starts, strict=True):
        end = begin + keys.shape[1]
        layer_keys[:, start : start + keys.shape[1]] = moved[:, begin:end]
        layer_values[:, start : start + keys.shape[1]] = values
        begin = end
