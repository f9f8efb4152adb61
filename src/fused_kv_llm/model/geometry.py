"""The shapes of a decoder's KV, and the rotation by which its keys are moved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fused_kv_kernels import RotationTable, rotation_table

__all__ = ["Geometry", "KVShape", "Rotation"]


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


class KVShape(NamedTuple):
    """Heads of the KV that a layer caches, and widths of a head's keys and values."""

    heads: int
    key_dim: int
    value_dim: int

    def pad_keys(self, part: Tensor) -> Tensor:
        """Return keys ``[..., heads, T, D]`` with zeros behind them up to this shape; themselves if they fill it."""
        return _padded(part, self.heads, self.key_dim)

    def pad_values(self, part: Tensor) -> Tensor:
        """Return values ``[..., heads, T, Dv]`` with zeros behind them up to this shape; as above."""
        return _padded(part, self.heads, self.value_dim)

    def of_keys(self, part: Tensor) -> Tensor:
        """Return what a layer of this shape uses of padded keys ``[..., Hkv, T, D]``: a view."""
        return part[..., : self.heads, :, : self.key_dim]

    def of_values(self, part: Tensor) -> Tensor:
        """Return what a layer of this shape uses of padded values ``[..., Hkv, T, Dv]``: a view."""
        return part[..., : self.heads, :, : self.value_dim]


def _padded(part: Tensor, heads: int, dim: int) -> Tensor:
    more_heads, more_dims = max(0, heads - part.shape[-3]), max(0, dim - part.shape[-1])
    if not more_heads and not more_dims:
        return part
    return torch.nn.functional.pad(part, (0, more_dims, 0, 0, 0, more_heads))


@dataclass(frozen=True, eq=False)
class Geometry:
    """Shapes and rotations of a decoder, as they were found when it was loaded (:mod:`.verification`).

    Where layers cache KV of several shapes, all are kept in the smallest shape that has room for each: behind a layer's
    own heads and dimensions stand zeros, which no rotation mixes with them, and of which attention sees nothing.

    Parameters
    ----------
    shapes : tuple of KVShape
        By layer that caches KV. These are a model's first layers; those behind them attend to KV of earlier ones.
    last_layer : int
        The model's last layer, which attends last.
    rotations : tuple of Rotation
        By layer that caches KV; layers that rotate alike share one object.
    rope_digest : str
        SHA-256 of everything that positions depend on: rotations and masks.
    context_length : int
        Longest prompt plus answer, in tokens.
    global_layers : tuple of int
        Of the layers that cache KV, those whose last token sees the first one in a context of that length; the others
        have a window.
    swaps : bool
        Whether the model gives its cache what carries the rotation as values (latent attention caches a latent without
        positions as keys). Here and in the store that is the keys, whatever the model calls it.
    attends_cache : bool
        Whether layers attend to what they cache. Latent attention does not: it expands it first.
    """

    shapes: tuple[KVShape, ...]
    last_layer: int
    rotations: tuple[Rotation, ...]
    rope_digest: str
    context_length: int
    global_layers: tuple[int, ...]
    swaps: bool = False
    attends_cache: bool = True

    @property
    def num_layers(self) -> int:
        """Layers that cache KV."""
        return len(self.shapes)

    @cached_property
    def room(self) -> KVShape:
        """The shape in which every layer's KV is kept."""
        return KVShape(*map(max, zip(*self.shapes, strict=True)))

    @cached_property
    def has_one_shape(self) -> bool:
        """Whether all layers' KV has the same shape."""
        return len(set(self.shapes)) == 1

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values one token takes over all layers."""
        heads, key_dim, value_dim = self.room
        return self.num_layers * heads * (key_dim + value_dim) * dtype.itemsize

    def tables(self, deltas: Tensor, device: torch.device | str = "cpu") -> list[RotationTable]:
        """Return what moves keys by `deltas` positions, int64 ``[T]``, in every layer; equal layers share a table."""
        made: dict[int, RotationTable] = {}
        for rotation in self.rotations:
            if id(rotation) not in made:
                table = rotation_table(deltas, rotation.inv_freq, rotation.interleaved)
                made[id(rotation)] = table.to(torch.device(device))
        return [made[id(rotation)] for rotation in self.rotations]
