"""The audit of a store: what is missing, damaged or foreign, and how it is mended."""

from __future__ import annotations

from fused_kv_llm.store.audit.check import check_remote, check_store
from fused_kv_llm.store.audit.findings import CheckReport, Finding, Progress
from fused_kv_llm.store.audit.rebuild import rebuild_index

__all__ = [
    "CheckReport",
    "Finding",
    "Progress",
    "check_remote",
    "check_store",
    "rebuild_index",
]
