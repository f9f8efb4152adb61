"""Boundary selection: the first tokens of every chunk but the first (EPIC's LegoLink, Hu et al. 2024).

There is no formula: tokens ``0 .. k - 1`` of the chunks 2, 3, ... are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Probe
from .budget import top_positions
from .views import View

__all__ = ["Boundary"]


@dataclass(frozen=True, slots=True)
class Boundary:
    """Takes token 0 of every chunk, then token 1 of every chunk, and so on until the budget is spent.

    The first tokens of a chunk were prefilled as if they began the context and attract attention as sinks;
    recomputing them repairs that. The prompt's first chunk does begin the context, behind the header alone, so nothing
    of it is recomputed; a budget larger than all other chunks is not spent. EPIC takes a fixed number of tokens of each
    chunk, here the budget says how many. It looks at no question and needs no probe.
    """

    name: ClassVar[str] = "boundary"

    def view(self, num_layers: int) -> View:
        """Return the empty view."""
        return View()

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the `budget` positions nearest to their chunk's beginning, none of the first chunk."""
        later = probe.chunk_index >= int(probe.has_first_chunk)
        return top_positions(probe.positions[later], -probe.offset[later].float(), budget)
