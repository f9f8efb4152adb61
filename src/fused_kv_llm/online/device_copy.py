"""Copying ahead on a GPU: chunk KV travels on a stream of its own while the model computes on another.

The chunks' memory in the store is pinned, so that copies run beside the computation. Each layer has an event: the
computation waits for the layer that it needs, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import torch

from fused_kv_llm.kv import ChunkSink, PlacedChunk

from .chunk_feed import ChunkFeed

__all__ = ["DeviceChunkFeed"]

_LAYERS_AHEAD = 2


class DeviceChunkFeed(ChunkFeed):
    """A chunk feed that copies on a side stream, some layers ahead of the one that is due.

    Parameters
    ----------
    chunks, sink, groups, executor
        As :class:`.ChunkFeed` takes them.
    device : torch.device
        A CUDA device.
    """

    def __init__(
        self,
        chunks: Sequence[PlacedChunk],
        sink: ChunkSink,
        groups: Sequence[range],
        executor: Executor | None,
        device: torch.device,
    ) -> None:
        super().__init__(chunks, sink, groups, executor)
        self._device = device
        self._coming = [layer for group in groups for layer in group]
        self._queued: dict[int, torch.cuda.Event] = {}
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # What the last request computed may still read the cache's memory.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def fill(self, layer_idx: int) -> None:
        """Let the computation wait for one layer's chunk KV, and queue the copies of the next layers.

        The calling thread waits for reads from disk only, never for a copy.

        Raises
        ------
        ChunkDamagedError
            If a chunk's file turns out to be damaged.
        """
        if layer_idx in self._coming:
            self._queue(layer_idx)
        if layer_idx not in self._queued:
            return
        torch.cuda.current_stream(self._device).wait_event(self._queued.pop(layer_idx))
        while len(self._queued) < _LAYERS_AHEAD and self._coming and self._ahead.is_read(self._coming[0]):
            self._queue(self._coming[0])

    def _queue(self, layer_idx: int) -> None:
        with torch.cuda.stream(self._stream):
            super().fill(layer_idx)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._queued[layer_idx] = event
        self._coming.remove(layer_idx)

    def close(self) -> None:
        """Drop what has not begun; the computation goes on once all copies are done, so that memory can be reused."""
        super().close()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
