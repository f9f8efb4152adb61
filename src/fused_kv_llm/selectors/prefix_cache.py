"""Prefix caching: the baseline that reuses nothing but exact prefixes, as vLLM and RAGCache do.

KV is reused up to the first token at which a prompt differs from all earlier ones: the header, and what earlier prompts
have left in the tree of answered prompts. Everything behind it is computed, so answers are those of full prefill. A
chunk is reused only behind the very same chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Probe
from .views import View

__all__ = ["PrefixCache"]


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """Takes all chunk tokens; an engine answers its requests at ratio 1, whatever ratio was asked for."""

    name: ClassVar[str] = "prefix_cache"

    def view(self, num_layers: int) -> View:
        """Return the empty view."""
        return View()

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the first `budget` positions: all of them at ratio 1."""
        return probe.positions[:budget]
