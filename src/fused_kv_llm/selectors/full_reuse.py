"""Full reuse: recompute nothing (TurboRAG, PromptCache; FusionRAG section 2.2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Probe
from .views import View

__all__ = ["FullReuse"]


@dataclass(frozen=True, slots=True)
class FullReuse:
    """Selects no token whatever the ratio: the fastest answer and the lower bound of quality."""

    name: ClassVar[str] = "full_reuse"

    def view(self, num_layers: int) -> View:
        """Return the empty view."""
        return View()

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return no position."""
        return probe.positions[:0]
