"""Shifting chunks: what a context changes in a chunk's KV, kept in eight bits and added with a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_shift_chunks, shift_table, supports_rows
from .rotate import rotate_in_torch

__all__ = ["ChunkShift", "ShiftStack", "shift_chunks"]


@dataclass(frozen=True, slots=True)
class ChunkShift:
    """What is added to one chunk's KV, in all layers.

    Parameters
    ----------
    start : int
        Position of the first token that is shifted.
    inside : slice
        The tokens of the chunk that are, with a start and a stop.
    weight : float
        Multiplies the difference.
    keys, values : tuple of Tensor
        int8 ``[L, Hkv, T, D]`` and its scales, float32 ``[L, Hkv, T, 1]``. The keys' difference has the rotation of the
        stored keys.
    """

    start: int
    inside: slice
    weight: float
    keys: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]

    @property
    def num_tokens(self) -> int:
        """Tokens that are shifted."""
        return int(self.inside.stop - self.inside.start)

    def difference(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return one layer's weighted differences, float32 ``[Hkv, num_tokens, D]``."""
        (k, k_scale), (v, v_scale) = (
            (whole[layer_idx, :, self.inside], scale[layer_idx, :, self.inside])
            for whole, scale in (self.keys, self.values)
        )
        return k * (k_scale * self.weight), v * (v_scale * self.weight)


def shift_chunks(
    shifts: Sequence[ChunkShift], layer_idx: int, cos: Tensor, sin: Tensor, layer_keys: Tensor, layer_values: Tensor
) -> None:
    """Add the shifts of several chunks to one layer in place.

    Parameters
    ----------
    shifts : sequence of ChunkShift
    layer_idx : int
    cos, sin : Tensor
        float32 ``[len(shifts), rotary / 2]``: :func:`fused_kv_kernels.rotation_tables` of the chunks' distances, which
        their keys have been rotated by.
    layer_keys, layer_values : Tensor
        ``[Hkv, N, D]``.

    Raises
    ------
    ValueError
        If a shift does not fit into the layer where it is to begin.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    if not shifts:
        return
    _check(shifts, layer_idx, layer_keys, layer_values)
    layer = (layer_keys, layer_values)
    cos, sin = (table.float().contiguous() for table in (cos, sin))
    if use_triton("chunk shift", cos, sin, layer_keys=layer_keys, layer_values=layer_values):
        run = triton_op("shift_chunks", layer_keys.device)
        run(shifts, layer_idx, cos, sin, *layer)
        return
    if _on_cpu(shifts) and supports_rows(*layer):
        native_shift_chunks(shift_table(shifts), layer_idx, _weights(shifts), cos, sin, *layer)
        return
    for number, shift in enumerate(shifts):
        span = slice(shift.start, shift.start + shift.num_tokens)
        keys, values = (part.to(layer_keys.device) for part in shift.difference(layer_idx))
        turned = rotate_in_torch(keys, cos[number : number + 1], sin[number : number + 1])
        layer_keys[:, span] += turned.to(layer_keys.dtype)
        layer_values[:, span] += values.to(layer_values.dtype)


class ShiftStack:
    """Shifts of several chunks, to be added layer by layer.

    What is the same in all layers is worked out once: with tens of chunks that takes as long as adding them.

    Parameters
    ----------
    shifts : sequence of ChunkShift
        All of the same layers.
    cos, sin : Tensor
        float32 ``[len(shifts), rotary / 2]``, as :func:`shift_chunks` takes them.
    """

    def __init__(self, shifts: Sequence[ChunkShift], cos: Tensor, sin: Tensor) -> None:
        self.shifts = list(shifts)
        self.cos, self.sin = (table.float().contiguous() for table in (cos, sin))
        self._fits: tuple[int, torch.Size] | None = None
        self._table = shift_table(self.shifts) if shifts and _on_cpu(shifts) else None
        self._weights = _weights(shifts)

    def add(self, layer_idx: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        """Add one layer of the shifts to a layer of a cache, ``[Hkv, N, D]`` each, in place."""
        layer = (layer_keys, layer_values)
        on_triton = use_triton("chunk shift", layer_keys=layer_keys, layer_values=layer_values)
        if self._table is not None and not on_triton and supports_rows(*layer):
            if self._fits is None or not 0 <= layer_idx < self._fits[0] or layer_keys.shape != self._fits[1]:
                _check(self.shifts, layer_idx, *layer)
                self._fits = min(shift.keys[0].shape[0] for shift in self.shifts), layer_keys.shape
            native_shift_chunks(self._table, layer_idx, self._weights, self.cos, self.sin, *layer)
            return
        shift_chunks(self.shifts, layer_idx, self.cos, self.sin, *layer)


def _on_cpu(shifts: Sequence[ChunkShift]) -> bool:
    parts = (part for shift in shifts for part in (*shift.keys, *shift.values))
    return all(part.is_contiguous() and part.device.type == "cpu" for part in parts)


def _weights(shifts: Sequence[ChunkShift]) -> Tensor:
    return torch.tensor([shift.weight for shift in shifts])


def _check(shifts: Sequence[ChunkShift], layer_idx: int, layer_keys: Tensor, layer_values: Tensor) -> None:
    heads, length, dim = layer_keys.shape
    for shift in shifts:
        whole, scale = shift.keys[0].shape, shift.keys[1].shape
        same = whole == shift.values[0].shape and scale == shift.values[1].shape == (*whole[:3], 1)
        dtypes = [part.dtype for part in (*shift.keys, *shift.values)]
        fits = (
            same
            and layer_keys.shape == layer_values.shape
            and (whole[1], whole[3]) == (heads, dim)
            and dtypes == [torch.int8, torch.float32] * 2
        )
        fits = fits and 0 <= layer_idx < whole[0] and 0 <= shift.inside.start <= shift.inside.stop <= whole[2]
        if not fits or shift.start < 0 or shift.start + shift.num_tokens > length:
            msg = (
                f"a shift of {list(whole)} by {dtypes}, tokens {shift.inside}, does not fit into layer {layer_idx} of "
                f"{list(layer_keys.shape)} at {shift.start}"
            )
            raise ValueError(msg)
