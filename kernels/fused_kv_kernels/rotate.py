"""Key re-rotation: move keys that are rotated already to other positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import triton_op, use_triton

__all__ = ["RotationTable", "rerotate_keys", "rotate_in_torch", "rotation_table"]


@dataclass(frozen=True, slots=True, eq=False)
class RotationTable:
    """By what keys are rotated: an angle for each row and each pair of dimensions.

    Parameters
    ----------
    cos, sin : Tensor
        float32 ``[T, rotary / 2]``.
    interleaved : bool
        Whether dimensions ``2 i`` and ``2 i + 1`` form a pair; without it, ``i`` and ``i + rotary / 2`` do. Dimensions
        from ``rotary`` on are not rotated.

    Raises
    ------
    ValueError
        If the tensors are not float32, of one shape with two axes, and on one device.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        fits = self.cos.shape == self.sin.shape and self.cos.dim() == 2 and self.cos.device == self.sin.device
        if not fits or {self.cos.dtype, self.sin.dtype} != {torch.float32}:
            msg = (
                f"a rotation table needs cosines and sines in float32, [T, rotary / 2] each, on one device (cos: "
                f"{self.cos.dtype} {list(self.cos.shape)} on {self.cos.device}, sin: {self.sin.dtype} "
                f"{list(self.sin.shape)} on {self.sin.device})"
            )
            raise ValueError(msg)
        # Kernels step from row to row by the number of pairs.
        object.__setattr__(self, "cos", self.cos.contiguous())
        object.__setattr__(self, "sin", self.sin.contiguous())

    def __len__(self) -> int:
        return int(self.cos.shape[0])

    @property
    def half(self) -> int:
        """Pairs of dimensions that are rotated."""
        return int(self.cos.shape[1])

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return self.cos.device

    def to(self, device: torch.device | str) -> RotationTable:
        """Return the table on a device; itself where it is there."""
        if self.device == torch.device(device):
            return self
        return RotationTable(self.cos.to(device), self.sin.to(device), self.interleaved)

    def rows(self, picked: slice | Tensor) -> RotationTable:
        """Return some of the rows: a slice of them, or those listed, int64."""
        return RotationTable(self.cos[picked], self.sin[picked], self.interleaved)

    def inverse(self) -> RotationTable:
        """Return the table that rotates back."""
        return RotationTable(self.cos, -self.sin, self.interleaved)


def rotation_table(deltas: Tensor, inv_freq: Tensor, interleaved: bool = False) -> RotationTable:
    """Return the table that moves keys by `deltas` positions.

    Parameters
    ----------
    deltas : Tensor
        int64 ``[T]``.
    inv_freq : Tensor
        ``[rotary / 2]``: the layer's frequencies, negative where it rotates the other way. A pair whose frequency is
        zero keeps every bit.
    interleaved : bool
        The layout of the pairs.

    Returns
    -------
    RotationTable
        On the device of `deltas`. The angles are formed in float64, since a float32 product is off by up to 1e-3
        radians at 16,000 positions.
    """
    angle = deltas.to(torch.float64)[:, None] * inv_freq.to(torch.float64)[None, :]
    return RotationTable(angle.cos().float(), angle.sin().float(), interleaved)


def rerotate_keys(keys: Tensor, table: RotationTable) -> Tensor:
    """Rotate keys by the angles of a table, in float32.

    Parameters
    ----------
    keys : Tensor
        ``[..., T, D]`` in any floating dtype.
    table : RotationTable
        A row for each key, or one for all keys alike; it rotates ``D`` dimensions at most.

    Returns
    -------
    Tensor
        ``[..., T, D]``, float32: the caller rounds once, when it writes the keys where they belong.

    Raises
    ------
    ValueError
        If the table does not fit the keys.
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    if len(table) not in (1, keys.shape[-2]) or 2 * table.half > keys.shape[-1]:
        msg = (
            f"key re-rotation needs one angle for each key, or one for all (keys {list(keys.shape)}, table "
            f"{list(table.cos.shape)})"
        )
        raise ValueError(msg)
    if not use_triton("key re-rotation", table.cos, table.sin, keys=keys):
        return rotate_in_torch(keys, table.cos, table.sin, table.interleaved)
    rotated: Tensor = triton_op("rerotate_keys", keys.device)(keys, table)
    return rotated


def rotate_in_torch(keys: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Do what :func:`rerotate_keys` does, on every device; `cos` and `sin` may have any shape that broadcasts."""
    wide = keys.float()
    half = cos.shape[-1]
    moved = torch.empty_like(wide)
    first, second = _pairs(wide, half, interleaved)
    to_first, to_second = _pairs(moved, half, interleaved)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    if 2 * half < wide.shape[-1]:
        moved[..., 2 * half :] = wide[..., 2 * half :]
    return moved


def _pairs(keys: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2]
    return keys[..., :half], keys[..., half : 2 * half]
