"""Shifting chunks: what a context changes in a chunk's KV, kept in eight bits and added with a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_shift_chunks, shift_table, supports
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
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    if not shifts:
        return
    layer = (layer_keys, layer_values)
    if use_triton("chunk shift", cos, sin, layer_keys=layer_keys, layer_values=layer_values):
        run = triton_op("shift_chunks", layer_keys.device)
        run(shifts, layer_idx, cos.float().contiguous(), sin.float().contiguous(), *layer)
        return
    if _on_cpu(shifts) and _native_takes(*layer):
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
        self.shifts, self.cos, self.sin = list(shifts), cos, sin
        self._table = shift_table(self.shifts) if shifts and _on_cpu(shifts) else None
        self._weights = _weights(shifts)

    def add(self, layer_idx: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        """Add one layer of the shifts to a layer of a cache, ``[Hkv, N, D]`` each, in place."""
        layer = {"layer_keys": layer_keys, "layer_values": layer_values}
        if self._table is not None and not use_triton("chunk shift", **layer) and _native_takes(*layer.values()):
            native_shift_chunks(self._table, layer_idx, self._weights, self.cos, self.sin, **layer)
            return
        shift_chunks(self.shifts, layer_idx, self.cos, self.sin, **layer)


def _on_cpu(shifts: Sequence[ChunkShift]) -> bool:
    parts = (part for shift in shifts for part in (*shift.keys, *shift.values))
    return all(part.is_contiguous() and part.device.type == "cpu" for part in parts)


def _native_takes(*layer: Tensor) -> bool:
    return all(part.stride(1) == part.shape[2] for part in layer) and supports(*layer)


def _weights(shifts: Sequence[ChunkShift]) -> Tensor:
    return torch.tensor([shift.weight for shift in shifts])
