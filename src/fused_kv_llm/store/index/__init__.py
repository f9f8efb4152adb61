"""The index of a store: one SQLite database of chunks, places and uses, and the eviction policies."""

from __future__ import annotations

from fused_kv_llm.store.index.chunk_index import ChunkIndex
from fused_kv_llm.store.index.ledger import Place, Uses, Victim
from fused_kv_llm.store.index.policies import POLICIES, Entry, EvictionQueue, Policy, RecomputeCost, resolve_policy
from fused_kv_llm.store.index.rows import ChunkRow, ContentRows, IdentityTotals

__all__ = [
    "POLICIES",
    "ChunkIndex",
    "ChunkRow",
    "ContentRows",
    "Entry",
    "EvictionQueue",
    "IdentityTotals",
    "Place",
    "Policy",
    "RecomputeCost",
    "Uses",
    "Victim",
    "resolve_policy",
]
