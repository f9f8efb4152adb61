"""Shifting chunks: what a context changes in a chunk's KV, kept in eight bits and added with a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .native import native_shift_chunks, shift_table, supports
from .rotate import rerotate_keys

__all__ = ["ChunkShift", "ShiftStack"]


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


class ShiftStack:
    """Shifts of several chunks, to be added layer by layer.

    Parameters
    ----------
    shifts : sequence of ChunkShift
        All of the same layers.
    cos, sin : Tensor
        float32 ``[len(shifts), rotary / 2]``: :func:`fused_kv_kernels.rotation_tables` of the chunks' distances, which
        their keys have been rotated by.
    """

    def __init__(self, shifts: Sequence[ChunkShift], cos: Tensor, sin: Tensor) -> None:
        self.shifts, self.cos, self.sin = list(shifts), cos, sin
        parts = [part for shift in shifts for part in (*shift.keys, *shift.values)]
        on_cpu = all(part.is_contiguous() and part.device.type == "cpu" for part in parts)
        self._table = shift_table(shifts) if on_cpu else None
        self._weights = torch.tensor([shift.weight for shift in shifts])

    def add(self, layer: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        """Add layer `layer` of the shifts to a layer of a cache, ``[Hkv, N, D]`` each, in place."""
        if not self.shifts:
            return
        target = (layer_keys, layer_values)
        if self._table is not None and supports(*target) and all(t.stride(1) == t.shape[2] for t in target):
            native_shift_chunks(self._table, layer, self._weights, self.cos, self.sin, *target)
            return
        for number, shift in enumerate(self.shifts):
            span = slice(shift.start, shift.start + shift.num_tokens)
            keys, values = (part.to(layer_keys.device) for part in shift.difference(layer))
            turned = rerotate_keys(keys, self.cos[number : number + 1], self.sin[number : number + 1])
            layer_keys[:, span] += turned.to(layer_keys.dtype)
            layer_values[:, span] += values.to(layer_values.dtype)
