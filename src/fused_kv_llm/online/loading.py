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

from .device_copy import CopyStream, copy_stream

if TYPE_CHECKING:
    from .request import Placement

__all__ = ["LAYERS_PER_READ", "ChunkLoader", "layer_groups"]

LAYERS_PER_READ = 4
_LAYERS_AHEAD = 2


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
        # Of one group only: chunks that are stored compressed are copies here.
        self._stack: tuple[range, ChunkStack] | None = None
        self._reads = {
            (index, group.start): executor.submit(placement.stored.read_layers, group.start, group.stop)
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
            chunks = [self._inside(index, part) for index, part in enumerate(parts)]
            self._stack = group, ChunkStack(chunks, self._starts, self._cos, self._sin)
            nbytes = sum(keys.nbytes + values.nbytes for keys, values in parts)
            self._nbytes.update(dict.fromkeys(group, nbytes // len(group)))
        layer_keys, layer_values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        self._stack[1].place(layer_idx - group.start, layer_keys, layer_values)

    def _place_on_device(self, layer_idx: int) -> None:
        """Put one layer's chunk KV in place on the current stream, and note its bytes."""
        device, group = self._cache.keys.device, self._group_of[layer_idx]
        chunks, nbytes = [], 0
        for index in range(len(self._placements)):
            part = range(layer_idx, layer_idx + 1) if (index, group.start) not in self._reads else group
            keys, values = (both[layer_idx - part.start] for both in self._read(index, part))
            nbytes += keys.nbytes + values.nbytes
            # A part of a chunk is not contiguous: only whole ones are copied without a detour.
            moved = keys.to(device, non_blocking=True), values.to(device, non_blocking=True)
            chunks.append(self._inside(index, moved))
        layer_keys, layer_values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        place_chunks(chunks, self._starts, self._cos, self._sin, layer_keys, layer_values)
        self._nbytes[layer_idx] = nbytes

    def _inside(self, index: int, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the tokens ``[..., T, D]`` of a chunk that stand in the prompt."""
        segment = self._placements[index].segment
        span = slice(segment.chunk_start, segment.chunk_start + self._placements[index].num_tokens)
        return parts[0][..., span, :], parts[1][..., span, :]

    def _read(self, index: int, group: range) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[len(group), Hkv, T, D]`` of a whole chunk, waiting for them if need be."""
        queued = self._reads.get((index, group.start))
        if queued is None:
            return self._placements[index].stored.read_layers(group.start, group.stop)
        return queued.result()

    def cancel(self) -> None:
        """Drop reads that have not begun and wait for those that have, so that files can be closed."""
        for read in self._reads.values():
            if not read.cancel():
                read.exception()
        if self._side is not None:
            self._side.finish()


def _is_at_hand(placement: Placement) -> bool:
    """Whether a chunk's layers need no reading, and no decompression."""
    stored = placement.stored
    return stored.tier == "memory" and not stored.is_compressed
