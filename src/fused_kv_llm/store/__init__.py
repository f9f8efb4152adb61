"""The store of chunk KV: a memory tier over files on disk with an index, over a remote tier."""

from __future__ import annotations

from fused_kv_llm.store.archive import ExportReport, ImportReport
from fused_kv_llm.store.check_report import CheckReport, Finding
from fused_kv_llm.store.index import ChunkRow, ContentRows, IdentityTotals
from fused_kv_llm.store.policies import DEFAULT_POLICY, POLICIES
from fused_kv_llm.store.quantize import STORAGE_DTYPES
from fused_kv_llm.store.rebuild import rebuild_index
from fused_kv_llm.store.stats import StoreStats
from fused_kv_llm.store.store import KVStore
from fused_kv_llm.store.stored_kv import StoredKV, StoredLayers
from fused_kv_llm.store.uses import StoreCounters

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "STORAGE_DTYPES",
    "CheckReport",
    "ChunkRow",
    "ContentRows",
    "ExportReport",
    "Finding",
    "IdentityTotals",
    "ImportReport",
    "KVStore",
    "StoreCounters",
    "StoreStats",
    "StoredKV",
    "StoredLayers",
    "rebuild_index",
]
