"""Where one request's KV is put together: chunks at their places, the sinks that loaders write to, and shared pages."""

from __future__ import annotations

from .chunk_changes import ChunkChanges
from .chunk_sink import ChunkSink
from .page_pool import ChunkPage, PagePool, why_not_shared
from .placed_chunk import PlacedChunk
from .shift_sink import ShiftSink

__all__ = ["ChunkChanges", "ChunkPage", "ChunkSink", "PagePool", "PlacedChunk", "ShiftSink", "why_not_shared"]
