"""The store of chunk KV: files on disk with an index, and a memory tier over them."""

from __future__ import annotations

from fused_kv_llm.store.index import ChunkRow, ContentRows
from fused_kv_llm.store.store import KVStore, StoreStats
from fused_kv_llm.store.stored_kv import StoredKV

__all__ = ["ChunkRow", "ContentRows", "KVStore", "StoreStats", "StoredKV"]
