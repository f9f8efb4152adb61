"""Beyond one machine, on Ray: ingestion into a shared store, replicas behind a router, sizing (extra ``ray``).

Nothing here is imported before it is used: Ray and the server take seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .corpus_reader import read_files
    from .ingestion import build_kv_cache_distributed
    from .reports import DistributedIngestReport
    from .resources import ActorResources, running_ray
    from .serve_app import build_app, run_app
    from .sizing import Sizing, size
    from .sizing_inputs import Machine, ModelGeometry, Workload

__all__ = [
    "ActorResources",
    "DistributedIngestReport",
    "Machine",
    "ModelGeometry",
    "Sizing",
    "Workload",
    "build_app",
    "build_kv_cache_distributed",
    "read_files",
    "run_app",
    "running_ray",
    "size",
]

_HOMES = {
    "ActorResources": "resources",
    "DistributedIngestReport": "reports",
    "Machine": "sizing_inputs",
    "ModelGeometry": "sizing_inputs",
    "Sizing": "sizing",
    "Workload": "sizing_inputs",
    "build_app": "serve_app",
    "build_kv_cache_distributed": "ingestion",
    "read_files": "corpus_reader",
    "run_app": "serve_app",
    "running_ray": "resources",
    "size": "sizing",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for from the module that has it."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
