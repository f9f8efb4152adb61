"""Chunk KV shifted to its place: the first chunk of a prompt stays plain, later ones get what neighbours change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_kv_kernels import rotation_tables
from fused_kv_llm.context_shift import CONTEXT_SHIFT, place_weight
from fused_kv_llm.model import FusedCache, Geometry
from fused_kv_llm.store.sides import SideFiles

from .request import Placement

__all__ = ["ContextShift"]


def _add_turned(keys: Tensor, difference: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Add a difference ``[Hkv, T, D]`` to keys in place, turned by ``[1, rotary / 2]`` tables."""
    half = cos.shape[-1]
    first, second, rest = difference[..., :half], difference[..., half : 2 * half], difference[..., 2 * half :]
    keys[..., :half].addcmul_(first, cos).addcmul_(second, sin, value=-1.0)
    keys[..., half : 2 * half].addcmul_(second, cos).addcmul_(first, sin)
    if rest.shape[-1]:
        keys[..., 2 * half :] += rest


class ContextShift:
    """Adds every chunk's context shift to its stored KV, layer by layer, after the loader has put it in place.

    Side files are read when the first layer is due: a probe that sees only anchors needs none of them.

    Parameters
    ----------
    placements : sequence of Placement
        The chunks, in prompt order.
    prefix_tokens : int
        Tokens of the header, which every chunk was prefilled after.
    cache : FusedCache
    geometry : Geometry
    sides : SideFiles
        Where the shifts are; a chunk without one, stored without neighbours, stays as it is.

    Attributes
    ----------
    bytes_read : int
        Bytes of the side files read so far.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        prefix_tokens: int,
        cache: FusedCache,
        geometry: Geometry,
        sides: SideFiles,
    ) -> None:
        self._placements = placements
        self._prefix_tokens = prefix_tokens
        self._cache = cache
        self._geometry = geometry
        self._sides = sides
        self._shifts: list[_Shift] | None = None
        self.bytes_read = 0

    def __call__(self, layer_idx: int) -> None:
        """Shift one layer's chunk KV, which has just been put in place."""
        if self._shifts is None:
            self._shifts = self._read()
        keys, values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        for shift in self._shifts:
            values[:, shift.span] += shift.difference("values", layer_idx).to(values)
            _add_turned(keys[:, shift.span], shift.difference("keys", layer_idx).to(keys), shift.cos, shift.sin)

    def _read(self) -> list[_Shift]:
        found: dict[str, dict[str, Tensor] | None] = {}
        shifts = []
        for placement in self._placements:
            key = placement.stored.key
            if key not in found:
                found[key] = self._sides.read(key, CONTEXT_SHIFT)
                self.bytes_read += sum(part.nbytes for part in (found[key] or {}).values())
            side = found[key]
            if side is not None:
                shifts.append(self._place(placement, side))
        return shifts

    def _place(self, placement: Placement, side: dict[str, Tensor]) -> _Shift:
        segment, like = placement.segment, self._cache.keys
        inside = slice(segment.chunk_start, segment.chunk_start + placement.num_tokens)
        weight = place_weight(segment.start - self._prefix_tokens, placement.stored.num_tokens)
        cos, sin = (
            table.to(like) for table in rotation_tables(torch.tensor([placement.delta]), self._geometry.inv_freq)
        )
        return _Shift(slice(segment.start, segment.stop), side, inside, weight, cos, sin)


class _Shift(NamedTuple):
    """One chunk's: prompt positions, side file, reused tokens of the chunk, weight, tables of its move."""

    span: slice
    side: dict[str, Tensor]
    inside: slice
    weight: float
    cos: Tensor
    sin: Tensor

    def difference(self, name: str, layer_idx: int) -> Tensor:
        """Return one layer's weighted difference, float32 ``[Hkv, T, D]``."""
        whole, scale = self.side[name], self.side[f"{name}_scale"]
        return whole[layer_idx, :, self.inside] * (scale[layer_idx, :, self.inside] * self.weight)
