"""Retrieval-augmented answers several times sooner: chunk KV precomputed at ingestion, fused at query time.

>>> from fused_kv_llm import FusedKVEngine
>>> engine = FusedKVEngine("smollm2-135m", kv_dir="./kv")          # doctest: +SKIP
>>> engine.build_kv_cache(chunks)                                  # doctest: +SKIP
>>> engine.generate(prompt_with_chunks).text                       # doctest: +SKIP
"""

from __future__ import annotations

from .engine import FusedKVEngine
from .errors import FusedKVError, FusedKVWarning
from .online import Generation, Piece
from .report import FusionReport, IngestReport

__all__ = [
    "FusedKVEngine",
    "FusedKVError",
    "FusedKVWarning",
    "FusionReport",
    "Generation",
    "IngestReport",
    "Piece",
    "__version__",
]

__version__ = "0.1.0"
