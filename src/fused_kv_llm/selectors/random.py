"""Random selection: the baseline every rule must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Probe
from .views import View

__all__ = ["Random"]


@dataclass(frozen=True, slots=True)
class Random:
    """Draws tokens uniformly without replacement; the same probe seed draws the same tokens."""

    name: ClassVar[str] = "random"

    def view(self, num_layers: int) -> View:
        """Return the empty view."""
        return View()

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return `budget` positions."""
        generator = torch.Generator().manual_seed(probe.seed)
        drawn = torch.randperm(probe.positions.shape[0], generator=generator)[:budget]
        return probe.positions[drawn.to(probe.positions.device)].sort().values
