"""Context shifts: add the change that a context makes to a chunk's KV, stored in eight bits, with a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton
from .native import native_shift_chunks, shift_table, supports_rows
from .rotate import RotationTable, rotate_in_torch

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
        int8 ``[L, Hk, T, Dk]`` and ``[L, Hv, T, Dv]``, each with its scales, float32 ``[L, H, T, 1]``. The keys'
        difference has the rotation of the stored keys.
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
        """Return one layer's differences, not weighted, float32 ``[H, num_tokens, D]``."""
        (k, k_scale), (v, v_scale) = (
            (whole[layer_idx, :, self.inside], scale[layer_idx, :, self.inside])
            for whole, scale in (self.keys, self.values)
        )
        return k * k_scale, v * v_scale


def shift_chunks(
    shifts: Sequence[ChunkShift], layer_idx: int, table: RotationTable, layer_keys: Tensor, layer_values: Tensor
) -> None:
    """Add the shifts of several chunks to one layer in place.

    Parameters
    ----------
    shifts : sequence of ChunkShift
    layer_idx : int
        Among the layers of the shifts.
    table : RotationTable
        A row for each shift: :func:`fused_kv_kernels.rotation_table` of the chunks' distances, which their keys have
        been rotated by.
    layer_keys, layer_values : Tensor
        ``[Hk, N, Dk]`` and ``[Hv, N, Dv]``.

    Raises
    ------
    ValueError
        If a shift does not fit into the layer where it is to begin.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    layers = max((shift.keys[0].shape[0] for shift in shifts), default=0)
    ShiftStack(shifts, [table] * layers).add(layer_idx, layer_keys, layer_values)


class ShiftStack:
    """Shifts of several chunks, to be added layer by layer.

    What is the same in all layers is worked out once: with tens of chunks that takes as long as adding them.

    Parameters
    ----------
    shifts : sequence of ChunkShift
        All of the same layers.
    tables : sequence of RotationTable
        One for each of their layers, as :func:`shift_chunks` takes them; the same one where layers rotate alike.

    Attributes
    ----------
    weights : Tensor
        float32 ``[2, len(shifts)]`` on the device of the tables: of the keys' shifts, and of the values'.

    Raises
    ------
    ValueError
        If there are not as many tables as layers, or not as many rows in a table as shifts.
    """

    def __init__(self, shifts: Sequence[ChunkShift], tables: Sequence[RotationTable]) -> None:
        self.shifts, self.tables = list(shifts), list(tables)
        self._check_tables()
        device = tables[0].device if tables else None
        self.weights = torch.tensor([[shift.weight for shift in shifts]] * 2, device=device).view(2, len(shifts))
        self._entries = shift_table(self.shifts) if shifts and _on_cpu(shifts) else None
        self._fits: set[tuple[int, torch.Size, torch.Size]] = set()

    def _check_tables(self) -> None:
        layers = {shift.keys[0].shape[0] for shift in self.shifts}
        if layers and layers != {len(self.tables)}:
            msg = f"shifts of {sorted(layers)} layers need a rotation table for each (got {len(self.tables)})"
            raise ValueError(msg)
        rows = {len(table) for table in self.tables} - {len(self.shifts)}
        if rows and self.shifts:
            msg = f"{len(self.shifts)} shifts need rotation tables of as many rows (got {sorted(rows)})"
            raise ValueError(msg)

    def add(self, layer_idx: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        """Add one layer of the shifts to a layer of a cache, in place.

        Parameters
        ----------
        layer_idx : int
        layer_keys, layer_values : Tensor
            ``[Hk, N, Dk]`` and ``[Hv, N, Dv]``.

        Raises
        ------
        ValueError
            If a shift does not fit into the layer.
        UnsupportedOperandsError
            If no kernel takes the tensors on their device.
        """
        if not self.shifts:
            return
        layer = (layer_keys, layer_values)
        self._check(layer_idx, *layer)
        table, weights = self.tables[layer_idx], self.weights
        if use_triton("chunk shift", table.cos, table.sin, weights, layer_keys=layer_keys, layer_values=layer_values):
            triton_op("shift_chunks", layer_keys.device)(self, layer_idx, *layer)
        elif self._entries is not None and supports_rows(*layer):
            native_shift_chunks(self._entries, layer_idx, weights, table, *layer)
        else:
            self._add_in_torch(layer_idx, *layer)

    def _add_in_torch(self, layer_idx: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        table = self.tables[layer_idx]
        for number, shift in enumerate(self.shifts):
            keys, values = (part.to(layer_keys.device) for part in shift.difference(layer_idx))
            one = slice(number, number + 1)
            turned = rotate_in_torch(keys, table.cos[one], table.sin[one], table.interleaved)
            layer_keys[:, shift.span] += (turned * self.weights[0, number]).to(layer_keys.dtype)
            layer_values[:, shift.span] += (values * self.weights[1, number]).to(layer_values.dtype)

    def _check(self, layer_idx: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        """Look once a shape of layer whether the shifts fit into it."""
        is_one = 0 <= layer_idx < len(self.tables)
        half = self.tables[layer_idx].half if is_one else 0
        shape = half, layer_keys.shape, layer_values.shape
        if not is_one or shape not in self._fits:
            _check(self.shifts, layer_idx, half, layer_keys, layer_values)
            self._fits.add(shape)


def _on_cpu(shifts: Sequence[ChunkShift]) -> bool:
    parts = (part for shift in shifts for part in (*shift.keys, *shift.values))
    return all(part.is_contiguous() and part.device.type == "cpu" for part in parts)


def _check(shifts: Sequence[ChunkShift], layer_idx: int, half: int, layer_keys: Tensor, layer_values: Tensor) -> None:
    length = layer_keys.shape[1]
    for shift in shifts:
        whole = shift.keys[0].shape
        fits = layer_values.shape[1] == length and 2 * half <= whole[3]
        for (part, scale), layer in ((shift.keys, layer_keys), (shift.values, layer_values)):
            fits = fits and part.shape == (*whole[:1], layer.shape[0], whole[2], layer.shape[2])
            fits = fits and scale.shape == (*part.shape[:3], 1)
            fits = fits and (part.dtype, scale.dtype) == (torch.int8, torch.float32)
        fits = fits and 0 <= layer_idx < whole[0] and 0 <= shift.inside.start <= shift.inside.stop <= whole[2]
        if not fits or shift.start < 0 or shift.start + shift.num_tokens > length:
            msg = (
                f"a shift of keys {_shapes(shift.keys)} and values {_shapes(shift.values)}, tokens {shift.inside}, "
                f"does not fit into layer {layer_idx} of {list(layer_keys.shape)} and {list(layer_values.shape)} at "
                f"{shift.start}"
            )
            raise ValueError(msg)


def _shapes(pair: tuple[Tensor, Tensor]) -> str:
    return " and scales ".join(f"{list(part.shape)} {part.dtype}" for part in pair)
