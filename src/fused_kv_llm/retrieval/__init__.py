"""Searches that answer in stages: provisional results first, the final ones last.

A search that takes long mostly has its results early (RAGCache, section 5.3). What is found meanwhile tells an engine
what to load and to compute before the search ends; see :meth:`fused_kv_llm.FusedKVEngine.speculate`. Nothing here knows
a framework or a model.
"""

from __future__ import annotations

from .faiss_stages import FaissStages
from .protocol import QuickFirst, StagedSearch, last_of

__all__ = ["FaissStages", "QuickFirst", "StagedSearch", "last_of"]
