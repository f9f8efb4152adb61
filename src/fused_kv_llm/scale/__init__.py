"""Beyond one machine, on Ray: ingestion on many workers into a shared store (extra ``ray``).

Nothing here imports Ray before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .corpus_reader import read_files
    from .ingestion import build_kv_cache_distributed
    from .reports import DistributedIngestReport
    from .resources import ActorResources, running_ray

__all__ = [
    "ActorResources",
    "DistributedIngestReport",
    "build_kv_cache_distributed",
    "read_files",
    "running_ray",
]

# Imported when first asked for: a module needs Ray, or takes long.
_MODULES = {
    "ActorResources": "resources",
    "DistributedIngestReport": "reports",
    "build_kv_cache_distributed": "ingestion",
    "read_files": "corpus_reader",
    "running_ray": "resources",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for from the module that has it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
