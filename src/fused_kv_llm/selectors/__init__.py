"""Selectors: which chunk tokens to recompute. One method is one file, or one preset of a file."""

from __future__ import annotations

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.selectors.anchors import anchor_positions, is_of_shift, knorm_scores, sidecar_names, sink_scores
from fused_kv_llm.selectors.profiles import save_anchors, save_profile

from .base import Probe, ScoringSelector, Selector, TransferringSelector, checked_selection, transfer_strength
from .boundary import Boundary
from .budget import budget_tokens
from .cache_craft import (
    CacheCraft,
    VariantSelector,
    cache_context_impact,
    fix_overhead,
    plain_overhead,
    variant_selector,
)
from .cache_craft_online import CacheCraftOnline
from .focus import focused_chunks, is_settled
from .full_reuse import FullReuse
from .heavy_hitters import HeavyHitters
from .kv_deviation import CACHEBLEND, CACHEBLEND_RELEASED, KVSHARE, KVDeviation
from .prefix_cache import PrefixCache
from .profiles import anchors_of, critical_layers
from .query_attention import ALL_LAYERS, FUSIONRAG, MIDDLE_LAYERS, PROPHETKV, QCFUSE, QueryAttention
from .random import Random
from .sink_attention import SINK_ATTENTION_ANCHORS, SINK_ATTENTION_VARIANTS, SinkAttention
from .views import AnchorRule, Anchors, FirstLayersView, View

__all__ = [
    "SELECTORS",
    "AnchorRule",
    "Anchors",
    "CacheCraft",
    "CacheCraftOnline",
    "FirstLayersView",
    "KVDeviation",
    "PrefixCache",
    "Probe",
    "QueryAttention",
    "ScoringSelector",
    "Selector",
    "SinkAttention",
    "TransferringSelector",
    "VariantSelector",
    "View",
    "anchor_positions",
    "anchors_of",
    "budget_tokens",
    "cache_context_impact",
    "checked_selection",
    "critical_layers",
    "fix_overhead",
    "focused_chunks",
    "is_of_shift",
    "is_settled",
    "knorm_scores",
    "plain_overhead",
    "resolve_selector",
    "save_anchors",
    "save_profile",
    "sidecar_names",
    "sink_scores",
    "transfer_strength",
    "variant_selector",
]

_ALL: tuple[Selector, ...] = (
    FullReuse(), PrefixCache(), Random(), Boundary(), CACHEBLEND, CACHEBLEND_RELEASED, KVSHARE, HeavyHitters(),
    CacheCraft(), CacheCraftOnline(), FUSIONRAG, PROPHETKV, QCFUSE, MIDDLE_LAYERS, ALL_LAYERS, SinkAttention(),
    SINK_ATTENTION_ANCHORS, SINK_ATTENTION_VARIANTS,
)  # fmt: skip
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
