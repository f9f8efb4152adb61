"""Layer-wise loading: chunk KV on its way from the store into a request's cache.

Chunks in the memory tier are read when their layer is due. Chunks on disk are read by background threads in the
order in which the passes will need the layers, so that reading and computing overlap. On a GPU, the copies of the
layers that come next run beside the computation too (:mod:`.device_copy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_kv_kernels import ChunkStack, place_chunks, rotation_tables
from fused_kv_llm.model import FusedCache, Geometry
from fused_kv_llm.store import StoredKV, StoredLayers

from .device_copy import CopyStream, copy_stream

if TYPE_CHECKING:
    from .request import Placement

__all__ = ["LAYERS_PER_READ", "ChunkLoader", "layer_groups"]

LAYERS_PER_READ = 4
_LAYERS_AHEAD = 2

_Pair = tuple[Tensor, Tensor]


def layer_groups(num_layers: int, first: Iterable[int] = (), at_once: int = LAYERS_PER_READ) -> list[range]:
    """Return the runs of layers to read, in the order they are needed.

    Parameters
    ----------
    num_layers : int
    first : iterable of int
        Layers a probe scores before anything else is needed.
    at_once : int
        Most layers of a run.

    Returns
    -------
    list of range
        Disjoint, covering all layers.
    """
    early = sorted(set(first))
    remaining = [layer for layer in range(num_layers) if layer not in early]
    groups: list[range] = []
    for run in (early, remaining):
        for layer in run:
            if groups and groups[-1].stop == layer and len(groups[-1]) < at_once and layer != run[0]:
                groups[-1] = range(groups[-1].start, layer + 1)
            else:
                groups.append(range(layer, layer + 1))
    return groups


class ChunkLoader:
    """Fills a cache's layers with the KV of one request's chunks.

    Parameters
    ----------
    placements : sequence of Placement
        The chunks, in prompt order.
    geometry : Geometry
    cache : FusedCache
        Where they go.
    executor : Executor
        Threads that read from disk.
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
        executor: Executor,
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
        # Layers that are views into memory need not be taken a few at a time.
        at_once = geometry.num_layers if all(map(_is_at_hand, placements)) else LAYERS_PER_READ
        groups = layer_groups(geometry.num_layers, first_layers, at_once)
        self._group_of = {layer: group for group in groups for layer in group}
        self._seen: set[int] = set()
        self._nbytes: dict[int, int] = {}
        # Of one group only: chunks in four bits, or in another floating dtype, are copies here.
        self._stack: tuple[range, ChunkStack] | None = None
        # Eight bits become the cache's dtype on their way into it. All chunks have them or none: identities differ.
        self._in_int8 = all(placement.stored.storage == "int8" for placement in placements)
        self._reads = {
            (index, group.start): executor.submit(self._read_now, placement.stored, group)
            for group in groups
            for index, placement in enumerate(placements)
            if placement.stored.tier != "memory"
        }

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
        coming = [layer for layer in self._group_of if layer not in self._seen][:_LAYERS_AHEAD]
        for layer in coming:
            group = self._group_of[layer].start
            reads = (self._reads.get((index, group)) for index in range(len(self._placements)))
            if side.is_placed(layer):
                continue
            if not all(read is None or read.done() for read in reads):
                return
            side.place(layer, self._place_on_device)

    def _place(self, layer_idx: int) -> None:
        """Put one layer's chunk KV in place, and note its bytes."""
        group = self._group_of[layer_idx]
        if self._stack is None or self._stack[0] != group:
            parts = [self._read(index, group) for index in range(len(self._placements))]
            chunks, scales = self._in_prompt(parts)
            self._stack = group, ChunkStack(chunks, self._starts, self._cos, self._sin, scales=scales)
            nbytes = sum(part.nbytes for part in parts)
            self._nbytes.update(dict.fromkeys(group, nbytes // len(group)))
        layer_keys, layer_values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        self._stack[1].place(layer_idx - group.start, layer_keys, layer_values)

    def _place_on_device(self, layer_idx: int) -> None:
        """Put one layer's chunk KV in place on the current stream, and note its bytes."""
        device, group = self._cache.keys.device, self._group_of[layer_idx]
        parts = []
        for index in range(len(self._placements)):
            run = range(layer_idx, layer_idx + 1) if (index, group.start) not in self._reads else group
            # A part of a chunk is not contiguous: only whole ones are copied without a detour.
            parts.append(self._read(index, run).layer(layer_idx - run.start).to(device))
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

    def _read(self, index: int, group: range) -> StoredLayers:
        """Return layers ``[len(group), Hkv, T, D]`` of a whole chunk, waiting for them if need be."""
        queued = self._reads.get((index, group.start))
        return self._read_now(self._placements[index].stored, group) if queued is None else queued.result()

    def _read_now(self, stored: StoredKV, group: range) -> StoredLayers:
        if self._in_int8:
            return stored.read_stored(group.start, group.stop)
        return StoredLayers(*stored.read_layers(group.start, group.stop))

    def cancel(self) -> None:
        """Drop reads that have not begun and wait for those that have, so that files can be closed."""
        for read in self._reads.values():
            if not read.cancel():
                read.exception()
        if self._side is not None:
            self._side.finish()


def _is_at_hand(placement: Placement) -> bool:
    """Whether a chunk's layers need neither be read nor made from something smaller."""
    return placement.stored.tier == "memory" and placement.stored.is_stored_as_read
