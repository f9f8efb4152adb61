"""What both framework packages need: options, shared engines, ingestion, retrieved texts, and threads.

Nothing here knows LangChain or LlamaIndex.
"""

from __future__ import annotations

from .batch import stream_all
from .index_vectors import IndexVectors, faiss_vectors, keep_index_vectors
from .model import PER_CALL_OPTIONS, FusedKVModel
from .progress import batch_progress
from .retrieval_log import RetrievalCheck, RetrievalLog
from .runtime import Runtime
from .sharing import EngineLease, lease_engine
from .speculation import search_staged
from .threads import collect_in_thread, in_thread, iterate_in_threads

__all__ = [
    "PER_CALL_OPTIONS",
    "EngineLease",
    "FusedKVModel",
    "IndexVectors",
    "RetrievalCheck",
    "RetrievalLog",
    "Runtime",
    "batch_progress",
    "collect_in_thread",
    "faiss_vectors",
    "in_thread",
    "iterate_in_threads",
    "keep_index_vectors",
    "lease_engine",
    "search_staged",
    "stream_all",
]
