"""What the framework adapters have in common: options, shared engines, and the hand-off from retriever to LLM.

Nothing in here knows LangChain or LlamaIndex.
"""

from __future__ import annotations

from .handoff import RetrievalCheck, RetrievalLog
from .model import PER_CALL_OPTIONS, FusedKVModel
from .runtime import Runtime
from .sharing import EngineLease, lease_engine
from .threads import collect_in_thread, in_thread, iterate_in_threads

__all__ = [
    "PER_CALL_OPTIONS",
    "EngineLease",
    "FusedKVModel",
    "RetrievalCheck",
    "RetrievalLog",
    "Runtime",
    "collect_in_thread",
    "in_thread",
    "iterate_in_threads",
    "lease_engine",
]
