"""The store of chunk KV: a memory tier over files on disk with an index, over a remote tier."""

from __future__ import annotations

from fused_kv_llm.store.anchor_kv import AnchorKV
from fused_kv_llm.store.anchor_layout import AnchorLayout
from fused_kv_llm.store.archive import ExportReport, ImportReport
from fused_kv_llm.store.audit import CheckReport, Finding, rebuild_index
from fused_kv_llm.store.folder import check_folder_key
from fused_kv_llm.store.format import STORAGE_DTYPES, stored_bytes_per_token
from fused_kv_llm.store.index import (
    POLICIES,
    ChunkRow,
    ContentRows,
    Entry,
    EvictionQueue,
    IdentityTotals,
    Policy,
    RecomputeCost,
    resolve_policy,
)
from fused_kv_llm.store.read import (
    CAN_ANNOUNCE,
    BlockReader,
    StoredKV,
    StoredLayers,
    StoredSidecar,
    ThrottledReader,
)
from fused_kv_llm.store.refresh import RefreshReport
from fused_kv_llm.store.remote import public_url
from fused_kv_llm.store.replacement import REPLACEMENT, open_replacement, replacement_name, replacement_tensors
from fused_kv_llm.store.shared import SharedTier, StoredElsewhere
from fused_kv_llm.store.sidecars import Sidecars
from fused_kv_llm.store.stats import ChunkStanding, StoreStats
from fused_kv_llm.store.store import KVStore
from fused_kv_llm.store.uses import StoreCounters
from fused_kv_llm.store.variant_record import VariantRecord, variant_name
from fused_kv_llm.store.variants import Variants

__all__ = [
    "CAN_ANNOUNCE",
    "POLICIES",
    "REPLACEMENT",
    "STORAGE_DTYPES",
    "AnchorKV",
    "AnchorLayout",
    "BlockReader",
    "CheckReport",
    "ChunkRow",
    "ChunkStanding",
    "ContentRows",
    "Entry",
    "EvictionQueue",
    "ExportReport",
    "Finding",
    "IdentityTotals",
    "ImportReport",
    "KVStore",
    "Policy",
    "RecomputeCost",
    "RefreshReport",
    "SharedTier",
    "Sidecars",
    "StoreCounters",
    "StoreStats",
    "StoredElsewhere",
    "StoredKV",
    "StoredLayers",
    "StoredSidecar",
    "ThrottledReader",
    "VariantRecord",
    "Variants",
    "check_folder_key",
    "open_replacement",
    "public_url",
    "rebuild_index",
    "replacement_name",
    "replacement_tensors",
    "resolve_policy",
    "stored_bytes_per_token",
    "variant_name",
]
