"""Where one request's KV is put together: chunks at their places, and the sinks that loaders write to."""

from __future__ import annotations

from .chunk_sink import ChunkSink
from .placed_chunk import PlacedChunk
from .shift_sink import ShiftSink

__all__ = ["ChunkSink", "PlacedChunk", "ShiftSink"]
