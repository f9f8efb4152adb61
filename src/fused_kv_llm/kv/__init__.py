"""Where a request's KV is put together: chunks at their places, sinks for loaders, shared pages, what prompts leave."""

from __future__ import annotations

from .chunk_changes import ChunkChanges
from .chunk_sink import ChunkSink
from .page_pool import ChunkPage, PagePool, why_not_shared
from .placed_chunk import PlacedChunk, VariantUse
from .prefix_eviction import LeastRecentlyUsed, PrefixEviction, RankedEviction, RecomputeSeconds
from .prefix_levels import HostLevel, SwapCounts
from .prefix_match import PrefixMatch
from .prefix_node import PrefixRun
from .prefix_tree import PrefixTree
from .shift_sink import ShiftSink

__all__ = [
    "ChunkChanges",
    "ChunkPage",
    "ChunkSink",
    "HostLevel",
    "LeastRecentlyUsed",
    "PagePool",
    "PlacedChunk",
    "PrefixEviction",
    "PrefixMatch",
    "PrefixRun",
    "PrefixTree",
    "RankedEviction",
    "RecomputeSeconds",
    "ShiftSink",
    "SwapCounts",
    "VariantUse",
    "why_not_shared",
]
