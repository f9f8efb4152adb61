"""Prefill-H2O: recompute the most-attended tokens of every chunk.

Known from one sentence of Cache-Craft (section 5.1.4), which names it as a baseline after H2O. It has no paper of its
own, so the formula below is this project's reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Probe, required
from .budget import top_positions
from .views import FirstLayersView

__all__ = ["HeavyHitters"]


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """Take from each chunk, in proportion to its length, the tokens that its own tokens attend to most.

    ``score(t) = sum of the attention from the later tokens of t's chunk to t``, averaged over heads and layers. H2O
    accumulates over all layers; the queries of stored chunks are not stored, so here the first layers are computed
    at query time and stand for the rest.

    Parameters
    ----------
    layers : int
        First layers to look at.
    """

    name: ClassVar[str] = "prefill_h2o"
    layers: int = 2

    def view(self, num_layers: int) -> FirstLayersView:
        """Return the first layers' attention."""
        return FirstLayersView(attention=tuple(range(min(self.layers, num_layers))))

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the heavy hitters.

        Raises
        ------
        FusedKVError
            If the probe has no attention sums, which is a fault of the caller.
        """
        received = required(probe.received_within, "attention sums within chunks", self.name)
        return top_positions(probe.positions, received, budget, chunk_index=probe.chunk_index, floor=1.0)
