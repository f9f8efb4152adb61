"""The shapes of a decoder's KV, and the rotation by which its keys are moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_kernels import RotationTable, rotation_table

__all__ = ["Geometry", "Rotation"]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """How a layer's keys are rotated by a position.

    Parameters
    ----------
    inv_freq : Tensor
        float32 ``[rotary / 2]`` on the CPU, radians a position. Zeros rotate nothing (a layer without positions);
        negative frequencies rotate the other way.
    interleaved : bool
        Whether dimensions ``2 i`` and ``2 i + 1`` form a pair; without it, ``i`` and ``i + rotary / 2`` do.
    """

    inv_freq: Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Shapes and rotations of a decoder, as they were found when it was loaded (:mod:`.verification`).

    Parameters
    ----------
    num_layers, num_kv_heads : int
        Layers, and heads of the KV that is cached.
    key_dim, value_dim : int
        Widths of a head's keys and values.
    rotations : tuple of Rotation
        By layer; layers that rotate alike share one object.
    rope_digest : str
        SHA-256 of everything that positions depend on: rotations and masks.
    context_length : int
        Longest prompt plus answer, in tokens.
    global_layers : tuple of int
        Layers whose last token sees the first one in a context of that length; the others have a window.
    swaps : bool
        Whether the model gives its cache what carries the rotation as values (latent attention caches a latent without
        positions as keys). Here and in the store that is the keys, whatever the model calls it.
    attends_cache : bool
        Whether layers attend to what they cache. Latent attention does not: it expands it first.
    """

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotations: tuple[Rotation, ...]
    rope_digest: str
    context_length: int
    global_layers: tuple[int, ...]
    swaps: bool = False
    attends_cache: bool = True

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values one token takes over all layers."""
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize

    def tables(self, deltas: Tensor, device: torch.device | str = "cpu") -> list[RotationTable]:
        """Return what moves keys by `deltas` positions, int64 ``[T]``, in every layer; equal layers share a table."""
        made: dict[int, RotationTable] = {}
        for rotation in self.rotations:
            if id(rotation) not in made:
                table = rotation_table(deltas, rotation.inv_freq, rotation.interleaved)
                made[id(rotation)] = table.to(torch.device(device))
        return [made[id(rotation)] for rotation in self.rotations]
