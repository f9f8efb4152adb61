"""The KV of one request while it is fused: its cache, and the feeds that bring stored KV into it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from fused_kv_llm.kv import ChunkChanges, ChunkSink, PlacedChunk, ShiftSink
from fused_kv_llm.model import FusedCache, LayerFiller

from .chunk_feed import ChunkFeed
from .context import FusionContext
from .device_copy import DeviceChunkFeed
from .read_ahead import layer_groups
from .request import Request
from .shift_feed import ShiftFeed

__all__ = ["RequestKV"]


class RequestKV:
    """A cache that holds the prefix's KV, and what fills its other layers.

    As a context manager it ends the feeds; if an error is raised inside, the cache's memory is given back too.

    Parameters
    ----------
    context : FusionContext
    request : Request
    capacity : int
        Prompt tokens plus room for the answer.

    Attributes
    ----------
    cache : FusedCache
    fillers : tuple of LayerFiller
        For the passes that attend to the chunks; empty before :meth:`feed`.
    changes : ChunkChanges or None
        What they add to the chunks, where that is noted so that their pages can be shared.
    """

    def __init__(self, context: FusionContext, request: Request, capacity: int) -> None:
        self._context = context
        self._request = request
        self.cache = FusedCache(context.loaded.geometry, capacity, context.pool)
        self.write_prefix()
        self.chunks: ChunkFeed | None = None
        self.shifts: ShiftFeed | None = None
        self.fillers: tuple[LayerFiller, ...] = ()
        notes = context.pages is not None and bool(request.chunks)
        self.changes = ChunkChanges(len(request.chunks), context.loaded.geometry) if notes else None

    def write_prefix(self) -> None:
        """Put the KV of the prefix into the cache."""
        request, prefix = self._request, self._context.prefix
        count, keys, values = request.prefix_tokens, self.cache.keys[:, 0], self.cache.values[:, 0]
        if request.match is not None:
            request.match.write(keys, values, count)
        else:
            keys[:, :, :count] = prefix.keys[:, :, :count]
            values[:, :, :count] = prefix.values[:, :, :count]

    def feed(self, first_layers: Sequence[int], *, shifts_at_once: bool) -> None:
        """Begin to read the request's chunks and their context shifts.

        Parameters
        ----------
        first_layers : sequence of int
            Layers that are needed first.
        shifts_at_once : bool
            Whether sidecars are opened now, or when the first layer is due.
        """
        context, chunks = self._context, self._request.chunks
        geometry, executor = context.loaded.geometry, context.executor
        shift_sink = ShiftSink(chunks, self._request.header_tokens, self.cache, geometry, self.changes)
        sidecars, name = context.sidecars, context.shift_name
        loading = self._request.loading
        singly = loading is not None and not loading.is_complete
        self.shifts = ShiftFeed(
            shift_sink, sidecars, name, geometry.num_layers, first_layers, executor, self._request.shifts, singly=singly
        )
        if shifts_at_once:
            self.shifts.start()
        sink = ChunkSink(chunks, self.cache, geometry)
        is_loaded = loading is not None and loading.is_complete
        resident = all(_is_resident(chunk, is_loaded) for chunk in chunks)
        groups = layer_groups(geometry.num_layers, first_layers, resident=resident, singly=singly)
        if self.cache.keys.device.type == "cuda":
            self.chunks = DeviceChunkFeed(chunks, sink, groups, executor, self.cache.keys.device)
        else:
            self.chunks = ChunkFeed(chunks, sink, groups, executor)
        self.fillers = (self.chunks, self.shifts)

    @property
    def bytes_read(self) -> int:
        """Bytes of chunk KV and context shifts read so far; what was read twice counts twice."""
        if self.chunks is None or self.shifts is None:
            return 0
        return self.chunks.bytes_filled + self.shifts.bytes_read

    @property
    def read_s(self) -> float:
        """Seconds that the computation has waited for chunk KV and context shifts, or read them itself."""
        return sum(feed.read_s for feed in (self.chunks, self.shifts) if feed is not None)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close(keep=kind is None)

    def close(self, *, keep: bool) -> None:
        """End the feeds.

        Parameters
        ----------
        keep : bool
            Whether the cache goes on; otherwise its memory is given back.
        """
        try:
            for feed in (self.chunks, self.shifts):
                if feed is not None:
                    feed.close()
        finally:
            if not keep:
                self.cache.release()


def _is_resident(chunk: PlacedChunk, is_loaded: bool) -> bool:
    """Whether a chunk's layers are in memory as they are needed, so that nothing is read or converted."""
    return (is_loaded or chunk.stored.tier == "memory") and chunk.stored.is_stored_as_read
