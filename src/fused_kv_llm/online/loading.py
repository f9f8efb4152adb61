"""Layer-wise loading: chunk KV on its way from the store into a request's cache.

Chunks in the memory tier are read when their layer is due. Chunks on disk are read by background threads in the
order in which the passes will need the layers, so that reading and computing overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_kv_kernels import place_chunks, rotation_tables
from fused_kv_llm.model import FusedCache, Geometry

if TYPE_CHECKING:
    from .request import Placement

__all__ = ["ChunkLoader", "layer_groups"]

_LAYERS_PER_READ = 4


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
        chunks = []
        for index, placement in enumerate(self._placements):
            start = placement.segment.chunk_start
            keys, values = self._layer(index, placement, layer_idx)
            self.bytes_filled += keys.nbytes + values.nbytes
            chunks.append(
                (keys[:, start : start + placement.num_tokens], values[:, start : start + placement.num_tokens])
            )
        layer_keys, layer_values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        place_chunks(chunks, self._starts, self._cos, self._sin, layer_keys, layer_values)

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
