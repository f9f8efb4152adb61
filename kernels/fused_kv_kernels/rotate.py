"""Key re-rotation: move keys that are rotated already to other positions."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import UnsupportedOperandsError, triton_op, use_triton

__all__ = ["rerotate_keys", "rotate_in_torch", "rotation_tables"]


def rotation_tables(deltas: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines that move keys by `deltas` positions.

    Parameters
    ----------
    deltas : Tensor
        int64 ``[T]``.
    inv_freq : Tensor
        ``[rotary / 2]``.

    Returns
    -------
    tuple of Tensor
        Cosines and sines, float32 ``[T, rotary / 2]``. The angles are formed in float64, since a float32
        product is off by up to 1e-3 radians at 16,000 positions.
    """
    angle = deltas.to(torch.float64)[:, None] * inv_freq.to(torch.float64)[None, :]
    return angle.cos().float(), angle.sin().float()


def rerotate_keys(keys: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate keys by the angles of :func:`rotation_tables`, in float32.

    Parameters
    ----------
    keys : Tensor
        ``[..., T, D]`` in any floating dtype.
    cos, sin : Tensor
        float32 ``[T, rotary / 2]`` with ``rotary <= D``, or ``[1, rotary / 2]`` for all keys alike.
    interleaved : bool
        Whether dimensions ``2 i`` and ``2 i + 1`` form a pair; without it, ``i`` and ``i + rotary / 2`` do.

    Returns
    -------
    Tensor
        ``[..., T, D]``, float32: the caller rounds once, when it writes the keys where they belong.

    Raises
    ------
    UnsupportedOperandsError
        If no kernel takes the tensors on their device.
    """
    if not use_triton("key re-rotation", cos, sin, keys=keys):
        return rotate_in_torch(keys, cos, sin, interleaved)
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] not in (1, keys.shape[-2]):
        msg = f"key re-rotation needs one angle for each key, or one for all (keys {list(keys.shape)}, "
        raise UnsupportedOperandsError(f"{msg}cos {list(cos.shape)}, sin {list(sin.shape)})")
    tables = (table.float().contiguous() for table in (cos, sin))
    rotated: Tensor = triton_op("rerotate_keys", keys.device)(keys, *tables, interleaved)
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
