"""Selectors: which chunk tokens to recompute. One method is one file, or one preset of a file."""

from __future__ import annotations

from fused_kv_llm.errors import ConfigError

from .base import Probe, Selector, View, budget_tokens, checked_selection
from .boundary import Boundary
from .full_reuse import FullReuse
from .query_attention import ALL_LAYERS, FUSIONRAG, MIDDLE_LAYERS, PROPHETKV, QueryAttention
from .random import Random

__all__ = [
    "SELECTORS",
    "Probe",
    "QueryAttention",
    "Selector",
    "View",
    "budget_tokens",
    "checked_selection",
    "resolve_selector",
]

_ALL = (FullReuse(), Random(), Boundary(), FUSIONRAG, PROPHETKV, MIDDLE_LAYERS, ALL_LAYERS)
SELECTORS: dict[str, Selector] = {selector.name: selector for selector in _ALL}


def resolve_selector(selector: str | Selector) -> Selector:
    """Return the selector of that name, or the object itself.

    Raises
    ------
    ConfigError
        If the name is unknown, or the object is no selector.
    """
    if isinstance(selector, str):
        if selector not in SELECTORS:
            raise ConfigError(f"selector={selector!r} is unknown: use one of {', '.join(sorted(SELECTORS))}")
        return SELECTORS[selector]
    if not isinstance(selector, Selector):
        raise ConfigError(f"selector={selector!r} has no name, view() and select(): see selectors.base.Selector")
    return selector
