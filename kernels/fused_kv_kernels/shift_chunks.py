"""Context shifts: add the change that a context makes to a chunk's KV, stored in eight bits, with a weight."""

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

    @property
    def span(self) -> slice:
        """The positions that are shifted."""
        return slice(self.start, self.start + self.num_tokens)

    def difference(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return one layer's differences, not weighted, float32 ``[Hkv, num_tokens, D]``."""
        (k, k_scale), (v, v_scale) = (
            (whole[layer_idx, :, self.inside], scale[layer_idx, :, self.inside])
            for whole, scale in (self.keys, self.values)
        )
        return k * k_scale, v * v_scale


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
    ShiftStack(shifts, cos, sin).add(layer_idx, layer_keys, layer_values)


class ShiftStack:
    """Shifts of several chunks, to be added layer by layer.

    What is the same in all layers is worked out once: with tens of chunks that takes as long as adding them.

    Parameters
    ----------
    shifts : sequence of ChunkShift
        All of the same layers.
    cos, sin : Tensor
        float32 ``[len(shifts), rotary / 2]``, as :func:`shift_chunks` takes them.

    Attributes
    ----------
    weights : Tensor
        float32 ``[2, len(shifts)]`` on the device of `cos`: of the keys' shifts, and of the values'.
    edges : Tensor
        int64 ``[len(shifts), 2]``, there too: the positions ``[start, stop)`` that are shifted.
    table : Table or None
        How native operators take the shifts; None where they do not.
    """

    def __init__(self, shifts: Sequence[ChunkShift], cos: Tensor, sin: Tensor) -> None:
        self.shifts = list(shifts)
        self.cos, self.sin = (table.float().contiguous() for table in (cos, sin))
        self.weights = torch.tensor([[shift.weight for shift in shifts]] * 2, device=cos.device).view(2, len(shifts))
        edges = [[shift.span.start, shift.span.stop] for shift in shifts]
        self.edges = torch.tensor(edges, dtype=torch.int64, device=cos.device).view(-1, 2)
        self.table = shift_table(self.shifts) if shifts and _on_cpu(shifts) else None
        self._fits: tuple[int, torch.Size] | None = None

    def add(self, layer_idx: int, layer_keys: Tensor, layer_values: Tensor, weights: Tensor | None = None) -> None:
        """Add one layer of the shifts to a layer of a cache, in place.

        Parameters
        ----------
        layer_idx : int
        layer_keys, layer_values : Tensor
            ``[Hkv, N, D]``.
        weights : Tensor or None
            float32 ``[2, len(shifts)]``: others than the shifts' own.

        Raises
        ------
        ValueError
            If a shift does not fit into the layer, or the weights are not two a shift.
        UnsupportedOperandsError
            If no kernel takes the tensors on their device.
        """
        if not self.shifts:
            return
        layer = (layer_keys, layer_values)
        self.check(layer_idx, *layer)
        weights = self.weights if weights is None else self._checked(weights)
        if use_triton("chunk shift", self.cos, self.sin, weights, layer_keys=layer_keys, layer_values=layer_values):
            triton_op("shift_chunks", layer_keys.device)(self, layer_idx, weights, *layer)
        elif self.table is not None and supports_rows(*layer):
            native_shift_chunks(self.table, layer_idx, weights, self.cos, self.sin, *layer)
        else:
            self._add_in_torch(layer_idx, *layer, weights)

    def _checked(self, weights: Tensor) -> Tensor:
        if weights.shape != self.weights.shape:
            msg = f"weights {list(weights.shape)} are not those of keys and values of {len(self.shifts)} shifts"
            raise ValueError(msg)
        return weights.to(self.weights.dtype).contiguous()

    def _add_in_torch(self, layer_idx: int, layer_keys: Tensor, layer_values: Tensor, weights: Tensor) -> None:
        for number, shift in enumerate(self.shifts):
            keys, values = (part.to(layer_keys.device) for part in shift.difference(layer_idx))
            turned = rotate_in_torch(keys, self.cos[number : number + 1], self.sin[number : number + 1])
            layer_keys[:, shift.span] += (turned * weights[0, number]).to(layer_keys.dtype)
            layer_values[:, shift.span] += (values * weights[1, number]).to(layer_values.dtype)

    def check(self, layer_idx: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        """Look once a shape of layer whether the shifts fit into it.

        Raises
        ------
        ValueError
            If one does not.
        """
        if self._fits is None or not 0 <= layer_idx < self._fits[0] or layer_keys.shape != self._fits[1]:
            _check(self.shifts, layer_idx, layer_keys, layer_values)
            self._fits = min(shift.keys[0].shape[0] for shift in self.shifts), layer_keys.shape


def _on_cpu(shifts: Sequence[ChunkShift]) -> bool:
    parts = (part for shift in shifts for part in (*shift.keys, *shift.values))
    return all(part.is_contiguous() and part.device.type == "cpu" for part in parts)


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
