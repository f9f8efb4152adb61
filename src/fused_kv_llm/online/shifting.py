"""Chunk KV shifted to its place: the first chunk of a prompt stays plain, later ones get what neighbours change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_kv_kernels import ChunkShift, rotation_tables, shift_chunks
from fused_kv_llm.context_shift import CONTEXT_SHIFT, place_weight
from fused_kv_llm.model import FusedCache, Geometry
from fused_kv_llm.store.sides import SideFiles

from .request import Placement

__all__ = ["ContextShift"]


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
        self._read_shifts: tuple[list[ChunkShift], Tensor, Tensor] | None = None
        self.bytes_read = 0

    def __call__(self, layer_idx: int) -> None:
        """Shift one layer's chunk KV, which has just been put in place."""
        if self._read_shifts is None:
            self._read_shifts = self._read()
        shifts, cos, sin = self._read_shifts
        keys, values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        shift_chunks(shifts, layer_idx, cos, sin, keys, values)

    def _read(self) -> tuple[list[ChunkShift], Tensor, Tensor]:
        found: dict[str, dict[str, Tensor] | None] = {}
        shifts, deltas = [], []
        for placement in self._placements:
            weight = place_weight(placement.segment.start - self._prefix_tokens, placement.stored.num_tokens)
            key = placement.stored.key
            if weight > 0 and key not in found:
                found[key] = self._sides.read(key, CONTEXT_SHIFT)
                self.bytes_read += sum(part.nbytes for part in (found[key] or {}).values())
            side = found.get(key)
            if weight > 0 and side is not None:
                shifts.append(_shift(placement, side, weight))
                deltas.append(placement.delta)
        cos, sin = rotation_tables(torch.tensor(deltas, dtype=torch.int64), self._geometry.inv_freq)
        device = self._cache.keys.device
        return shifts, cos.to(device), sin.to(device)


def _shift(placement: Placement, side: dict[str, Tensor], weight: float) -> ChunkShift:
    segment = placement.segment
    inside = slice(segment.chunk_start, segment.chunk_start + placement.num_tokens)
    keys, values = ((side[name], side[f"{name}_scale"]) for name in ("keys", "values"))
    return ChunkShift(segment.start, inside, weight, keys, values)
