"""Layer-wise loading: chunk KV on its way from the store into a request's cache.

Chunks in the memory tier are read when their layer is due. Chunks on disk are read by background threads in the
order in which the passes will need the layers, so that reading and computing overlap. On a GPU, the copies of the
layers that come next run beside the computation too (:mod:`.device_copy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_kv_kernels import place_chunks, rotation_tables
from fused_kv_llm.model import FusedCache, Geometry

from .device_copy import CopyStream, copy_stream

if TYPE_CHECKING:
    from .request import Placement

__all__ = ["ChunkLoader", "layer_groups"]

_LAYERS_PER_READ = 4
_LAYERS_AHEAD = 2


def layer_groups(num_layers: int, first: Iterable[int] = ()) -> list[range]:
    """Return the runs of layers to read, in the order they are needed.

    Parameters
    ----------
    num_layers : int
    first : iterable of int
        Layers a probe scores before anything else is needed.

    Returns
    -------
    list of range
        Disjoint, covering all layers, at most four layers each.
    """
    early = sorted(set(first))
    remaining = [layer for layer in range(num_layers) if layer not in early]
    groups: list[range] = []
    for run in (early, remaining):
        for layer in run:
            if groups and groups[-1].stop == layer and len(groups[-1]) < _LAYERS_PER_READ and layer != run[0]:
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
        self._reads: dict[tuple[int, int], tuple[int, Future[tuple[Tensor, Tensor]]]] = {}
        self._starts = [placement.segment.start for placement in placements]
        deltas = torch.tensor([placement.delta for placement in placements], dtype=torch.int64)
        tables = rotation_tables(deltas, geometry.inv_freq)
        self._cos, self._sin = (table.to(cache.keys.device) for table in tables)
        # On a GPU, after the tables: their copies are waited for.
        self._side = copy_stream(cache.keys.device)
        self._order = [layer for group in layer_groups(geometry.num_layers, first_layers) for layer in group]
        self._seen: set[int] = set()
        self._nbytes: dict[int, int] = {}
        for group in layer_groups(geometry.num_layers, first_layers):
            for index, placement in enumerate(placements):
                if placement.stored.tier == "memory":
                    continue
                read = executor.submit(placement.stored.read_layers, group.start, group.stop)
                for layer in group:
                    self._reads[index, layer] = (layer - group.start, read)

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
            self.bytes_filled += self._nbytes[layer_idx]
            return
        if not self._side.is_placed(layer_idx):
            self._side.place(layer_idx, self._place, again=layer_idx in self._seen)
        self.bytes_filled += self._nbytes[layer_idx]
        self._seen.add(layer_idx)
        self._side.wait(layer_idx)
        self._run_ahead(self._side)

    def _run_ahead(self, side: CopyStream) -> None:
        """Queue the copies of the layers that come next, as far as they have been read."""
        coming = [layer for layer in self._order if layer not in self._seen][:_LAYERS_AHEAD]
        for layer in coming:
            reads = (self._reads.get((index, layer)) for index in range(len(self._placements)))
            if side.is_placed(layer):
                continue
            if not all(read is None or read[1].done() for read in reads):
                return
            side.place(layer, self._place)

    def _place(self, layer_idx: int) -> None:
        """Put one layer's chunk KV in place on the current stream, and note its bytes."""
        device = self._cache.keys.device
        chunks, nbytes = [], 0
        for index, placement in enumerate(self._placements):
            start = placement.segment.chunk_start
            keys, values = self._layer(index, placement, layer_idx)
            nbytes += keys.nbytes + values.nbytes
            # A part of a chunk is not contiguous: only whole ones are copied without a detour.
            keys, values = (part.to(device, non_blocking=True) for part in (keys, values))
            chunks.append(
                (keys[:, start : start + placement.num_tokens], values[:, start : start + placement.num_tokens])
            )
        layer_keys, layer_values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        place_chunks(chunks, self._starts, self._cos, self._sin, layer_keys, layer_values)
        self._nbytes[layer_idx] = nbytes

    def _layer(self, index: int, placement: Placement, layer_idx: int) -> tuple[Tensor, Tensor]:
        queued = self._reads.get((index, layer_idx))
        if queued is None:
            keys, values = placement.stored.read_layers(layer_idx, layer_idx + 1)
            return keys[0], values[0]
        row, read = queued
        keys, values = read.result()
        return keys[row], values[row]

    def cancel(self) -> None:
        """Drop reads that have not begun and wait for those that have, so that files can be closed."""
        reads = {id(read): read for _, read in self._reads.values()}
        for read in reads.values():
            if not read.cancel():
                read.exception()
        if self._side is not None:
            self._side.finish()
