"""Beyond one machine: several replicas over a shared store. Nothing of it is imported before it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .serve_app import build_app, run_app
    from .sizing import Machine, ModelGeometry, Sizing, Workload, size

__all__ = ["Machine", "ModelGeometry", "Sizing", "Workload", "build_app", "run_app", "size"]

_HOMES = {
    "Machine": "sizing",
    "ModelGeometry": "sizing",
    "Sizing": "sizing",
    "Workload": "sizing",
    "build_app": "serve_app",
    "run_app": "serve_app",
    "size": "sizing",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: Ray and the server take seconds."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
