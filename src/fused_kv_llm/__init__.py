"""Retrieval-augmented answers several times sooner: chunk KV precomputed at ingestion, fused at query time.

>>> from fused_kv_llm import FusedKVEngine
>>> engine = FusedKVEngine("smollm2-135m", kv_dir="./kv")          # doctest: +SKIP
>>> engine.build_kv_cache(chunks)                                  # doctest: +SKIP
>>> engine.generate(prompt_with_chunks).text                       # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import FusedKVError, FusedKVWarning
from .report import FusionReport, IngestReport

if TYPE_CHECKING:
    from .engine import FusedKVEngine
    from .online import Generation, Piece

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

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for: torch takes seconds that ``fused-kv --help`` need not wait."""
    if name == "FusedKVEngine":
        from .engine import FusedKVEngine

        return FusedKVEngine
    if name in ("Generation", "Piece"):
        from . import online

        return getattr(online, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
