"""Reading chunks and sidecars: the files, the memory tier, and the objects that callers read from."""

from __future__ import annotations

from fused_kv_llm.store.read.blocks import BlockReader, ThrottledReader
from fused_kv_llm.store.read.memory import MemoryTier, ResidentFile
from fused_kv_llm.store.read.open_file import OpenFile
from fused_kv_llm.store.read.pieces import CAN_ANNOUNCE
from fused_kv_llm.store.read.prefetch import Prefetcher
from fused_kv_llm.store.read.reader import FileReader
from fused_kv_llm.store.read.stored_kv import StoredKV, StoredLayers, Tier
from fused_kv_llm.store.read.stored_sidecar import StoredSidecar
from fused_kv_llm.store.read.verify import as_file, verify_chunk, verify_sidecar

__all__ = [
    "CAN_ANNOUNCE",
    "BlockReader",
    "FileReader",
    "MemoryTier",
    "OpenFile",
    "Prefetcher",
    "ResidentFile",
    "StoredKV",
    "StoredLayers",
    "StoredSidecar",
    "ThrottledReader",
    "Tier",
    "as_file",
    "verify_chunk",
    "verify_sidecar",
]
