"""Reading stored KV: files, layers, the memory tier, and what a caller holds of an opened chunk."""

from __future__ import annotations

from fused_kv_llm.store.read.loader import ChunkLoader
from fused_kv_llm.store.read.memory import MemoryTier, ResidentChunk
from fused_kv_llm.store.read.pieces import CAN_ANNOUNCE
from fused_kv_llm.store.read.prefetch import Prefetcher
from fused_kv_llm.store.read.reader import ChunkReader
from fused_kv_llm.store.read.side_memory import SideMemory
from fused_kv_llm.store.read.stored_kv import StoredKV, StoredLayers
from fused_kv_llm.store.read.stored_sidecar import StoredSidecar, read_rows
from fused_kv_llm.store.read.verify import as_file, verify_chunk

__all__ = [
    "CAN_ANNOUNCE",
    "ChunkLoader",
    "ChunkReader",
    "MemoryTier",
    "Prefetcher",
    "ResidentChunk",
    "SideMemory",
    "StoredKV",
    "StoredLayers",
    "StoredSidecar",
    "as_file",
    "read_rows",
    "verify_chunk",
]
