"""Layer-wise loading: chunk KV on its way from the store into a request's cache.

Chunks in the memory tier are read when their layer is due. Chunks on disk are read in the order in which the passes
will need the layers, a little ahead of them (:mod:`.read_ahead`), so that reading and computing overlap. On a GPU,
the copies of the layers that come next run beside the computation too (:mod:`.device_copy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_kv_kernels import ChunkStack, place_chunks, rotation_tables
from fused_kv_llm.model import FusedCache, Geometry
from fused_kv_llm.store import StoredKV, StoredLayers

from .device_copy import CopyStream, copy_stream
from .read_ahead import LayerReads, ReadAhead, layer_groups

if TYPE_CHECKING:
    from .request import Placement

__all__ = ["ChunkLoader"]

_LAYERS_AHEAD = 2

_Pair = tuple[Tensor, Tensor]


class ChunkLoader:
    """Fills a cache's layers with the KV of one request's chunks.

    Parameters
    ----------
    placements : sequence of Placement
        The chunks, in prompt order.
    geometry : Geometry
    cache : FusedCache
        Where they go.
    executor : Executor or None
        Threads that read from disk; without them, the system is asked to read ahead.
    first_layers : sequence of int
        Layers that are needed first.

    Attributes
    ----------
    bytes_filled : int
        Bytes of the chunks' layers that have been asked for so far.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        geometry: Geometry,
        cache: FusedCache,
        executor: Executor | None,
        first_layers: Sequence[int] = (),
    ) -> None:
        self._placements = placements
        self._cache = cache
        self.bytes_filled = 0
        self._starts = [placement.segment.start for placement in placements]
        deltas = torch.tensor([placement.delta for placement in placements], dtype=torch.int64)
        tables = rotation_tables(deltas, geometry.inv_freq)
        self._cos, self._sin = (table.to(cache.keys.device) for table in tables)
        # On a GPU, after the tables: their copies are waited for.
        self._side = copy_stream(cache.keys.device)
        groups = layer_groups(geometry.num_layers, first_layers, at_hand=all(map(_is_at_hand, placements)))
        # Decided once: a chunk can become the memory tier's while the request reads it.
        self._is_read = [placement.stored.tier != "memory" for placement in placements]
        from_disk = [placement.stored for placement, is_read in zip(placements, self._is_read, strict=True) if is_read]
        places = [LayerReads(partial(self._read, stored), stored.announce_layers) for stored in from_disk]
        self._ahead = ReadAhead(executor, groups, places)
        self._seen: set[int] = set()
        self._nbytes: dict[int, int] = {}
        # Of one group only: chunks in four bits, or in another floating dtype, are copies here.
        self._stack: tuple[range, ChunkStack] | None = None
        # Eight bits become the cache's dtype on their way into it. All chunks have them or none: identities differ.
        self._in_int8 = all(placement.stored.storage == "int8" for placement in placements)
        self._ahead.start()

    def __call__(self, layer_idx: int) -> None:
        """Put one layer's chunk KV in place, waiting for it if need be.

        Raises
        ------
        ChunkDamagedError
            If a chunk's file turns out to be damaged.
        """
        if not self._placements:
            return
        if self._side is None:
            self._place(layer_idx)
        else:
            if not self._side.is_placed(layer_idx):
                self._side.place(layer_idx, self._place_on_device, again=layer_idx in self._seen)
            self._side.wait(layer_idx)
            self._seen.add(layer_idx)
            self._run_ahead(self._side)
        self.bytes_filled += self._nbytes[layer_idx]

    def _run_ahead(self, side: CopyStream) -> None:
        """Queue the copies of the layers that come next, as far as they have been read."""
        coming = [layer for layer in self._ahead.layers if layer not in self._seen][:_LAYERS_AHEAD]
        for layer in coming:
            if side.is_placed(layer):
                continue
            if not self._ahead.is_read(layer):
                return
            side.place(layer, self._place_on_device)

    def _place(self, layer_idx: int) -> None:
        """Put one layer's chunk KV in place, and note its bytes."""
        group = self._ahead.group(layer_idx)
        if self._stack is None or self._stack[0] != group:
            parts = self._parts(layer_idx, group)
            chunks, scales = self._in_prompt(parts)
            self._stack = group, ChunkStack(chunks, self._starts, self._cos, self._sin, scales=scales)
            nbytes = sum(part.nbytes for part in parts)
            self._nbytes.update(dict.fromkeys(group, nbytes // len(group)))
        layer_keys, layer_values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        self._stack[1].place(layer_idx - group.start, layer_keys, layer_values)

    def _place_on_device(self, layer_idx: int) -> None:
        """Put one layer's chunk KV in place on the current stream, and note its bytes."""
        device, group = self._cache.keys.device, self._ahead.group(layer_idx)
        parts = []
        # A part of a chunk is not contiguous: of one in memory only whole layers are copied without a detour.
        here = range(layer_idx, layer_idx + 1)
        for is_read, part in zip(self._is_read, self._parts(layer_idx, here), strict=True):
            parts.append(part.layer(layer_idx - group.start if is_read else 0).to(device))
        chunks, scales = self._in_prompt(parts)
        layer_keys, layer_values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        place_chunks(chunks, self._starts, self._cos, self._sin, layer_keys, layer_values, scales)
        self._nbytes[layer_idx] = sum(part.nbytes for part in parts)

    def _in_prompt(self, parts: Sequence[StoredLayers]) -> tuple[list[_Pair], list[_Pair] | None]:
        """Return keys and values ``[..., T, D]`` of the tokens that stand in the prompt, and int8's scales."""
        chunks, scales = [], []
        for placement, part in zip(self._placements, parts, strict=True):
            first = placement.segment.chunk_start
            span = slice(first, first + placement.num_tokens)
            chunks.append((part.keys[..., span, :], part.values[..., span, :]))
            if part.scales is not None:
                scales.append((part.scales[0], part.scales[1][..., span, :]))
        return chunks, scales if self._in_int8 else None

    def _parts(self, layer_idx: int, of_resident: range) -> list[StoredLayers]:
        """Return the chunks' layers ``[layers, Hkv, T, D]``, waiting for them if need be.

        Of chunks that are read these are the layer's group, of chunks in memory `of_resident`.
        """
        background = iter(self._ahead.take(layer_idx))
        return [
            next(background) if is_read else self._read(placement.stored, of_resident.start, of_resident.stop)
            for placement, is_read in zip(self._placements, self._is_read, strict=True)
        ]

    def _read(self, stored: StoredKV, start: int, stop: int) -> StoredLayers:
        """Return layers ``[stop - start, Hkv, T, D]`` of a whole chunk."""
        if self._in_int8:
            return stored.read_stored(start, stop)
        return StoredLayers(*stored.read_layers(start, stop))

    def cancel(self) -> None:
        """Drop reads that have not begun and wait for those that have, so that files can be closed."""
        self._ahead.close()
        if self._side is not None:
            self._side.finish()


def _is_at_hand(placement: Placement) -> bool:
    """Whether a chunk's layers need neither be read nor made from something smaller."""
    return placement.stored.tier == "memory" and placement.stored.is_stored_as_read
