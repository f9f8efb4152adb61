"""Loading chunk KV layer by layer: from the store into the sink that places it.

Chunks in the memory tier are read when their layer is due. Chunks on disk are read in the order in which the passes
need the layers, a little ahead of them (:mod:`.read_ahead`), so that reading and computing overlap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor

from fused_kv_llm.kv import ChunkSink, PlacedChunk

from .read_ahead import LayerReads, ReadAhead

__all__ = ["ChunkFeed"]


class ChunkFeed:
    """Fills a request's layers with the KV of its chunks.

    Parameters
    ----------
    chunks : sequence of PlacedChunk
        In prompt order.
    sink : ChunkSink
        Where their layers go.
    groups : sequence of range
        All layers, in the order they are needed (:func:`.read_ahead.layer_groups`).
    executor : Executor or None
        Threads that read from disk; without them, the system is asked to read ahead.

    Attributes
    ----------
    bytes_filled : int
        Bytes of the chunks' layers that have been placed so far.
    read_s : float
        Seconds that the computation has waited for them, or read them itself.
    """

    def __init__(
        self, chunks: Sequence[PlacedChunk], sink: ChunkSink, groups: Sequence[range], executor: Executor | None
    ) -> None:
        self._sink = sink
        # Decided once: a chunk can come into the memory tier while the request reads it.
        self._stored = [(chunk.stored, chunk.stored.tier != "memory") for chunk in chunks]
        on_disk = [stored for stored, is_on_disk in self._stored if is_on_disk]
        self._ahead = ReadAhead(
            executor, groups, [LayerReads(stored.read_stored, stored.announce_layers) for stored in on_disk]
        )
        self._filled: set[int] = set()
        self._layer_nbytes = 0
        self.bytes_filled, self.read_s = 0, 0.0
        self._ahead.start()

    def fill(self, layer_idx: int) -> None:
        """Have one layer's chunk KV in place, waiting for it if need be; only the first call does anything.

        Raises
        ------
        ChunkDamagedError
            If a chunk's file turns out to be damaged.
        """
        if layer_idx in self._filled:
            return
        group = self._ahead.group(layer_idx)
        if self._sink.layers != group:
            started_s = time.perf_counter()
            reads = iter(self._ahead.take(layer_idx))
            parts = [
                next(reads) if is_on_disk else stored.read_stored(group.start, group.stop)
                for stored, is_on_disk in self._stored
            ]
            self.read_s += time.perf_counter() - started_s
            self._sink.receive(group, parts)
            self._layer_nbytes = sum(part.nbytes for part in parts) // len(group)
        self._sink.place(layer_idx)
        self._filled.add(layer_idx)
        self.bytes_filled += self._layer_nbytes

    def close(self) -> None:
        """Drop reads that have not begun and wait for those that have, so that files can be closed."""
        self._ahead.close()
