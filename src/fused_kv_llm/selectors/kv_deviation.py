"""KV deviation: recompute the tokens whose stored KV is furthest from what the prompt would give them.

CacheBlend (Yao et al. 2025) computes the first layers for all tokens and compares. In FusionRAG's numbers (section
2.2.2): (7) ``deviation(t) = |KV_fresh(t) - KV_stored(t)|``, (8) ``critical tokens = Top-k(deviation)``. Layer 0 cannot
deviate, since its keys and values depend on the token and its position alone, so the comparison begins at layer 1.
Tokens that deviate there mostly deviate later on too; what is kept is narrowed layer by layer until the budget is
reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Probe, required
from .budget import top_positions
from .views import FirstLayersView

__all__ = ["CACHEBLEND", "CACHEBLEND_RELEASED", "KVSHARE", "KVDeviation"]


@dataclass(frozen=True, slots=True)
class KVDeviation:
    """Take the tokens with the highest KV deviation in the first layers.

    ``deviation(t) = sqrt(|K_fresh(t) - K_stored(t)|^2 + |V_fresh(t) - V_stored(t)|^2)`` over all heads, keys compared
    at the prompt's positions.

    Parameters
    ----------
    name : str
        Name under which the preset is chosen and reported.
    layers : tuple of int
        Layers at which tokens are compared; those that a shallow model does not have are left out.
    keep : tuple of float
        Tokens that go on after each of them, as multiples of the budget.
    by_attention : bool
        Whether the deviation is scaled by the attention that the token receives in layer 0.
    """

    name: str
    layers: tuple[int, ...] = (1, 2, 3)
    keep: tuple[float, ...] = (1.5, 1.25, 1.0)
    by_attention: bool = False

    def view(self, num_layers: int) -> FirstLayersView:
        """Return the layers to compare."""
        pairs = [pair for pair in zip(self.layers, self.keep, strict=True) if pair[0] < num_layers]
        layers, keep = (tuple(column) for column in zip(*pairs, strict=True)) if pairs else ((0,), (1.0,))
        return FirstLayersView(deviation=layers, keep=(*keep[:-1], 1.0), attention=(0,) if self.by_attention else ())

    def score(self, probe: Probe) -> Tensor:
        """Return the deviation, scaled where the preset says so.

        Raises
        ------
        FusedKVError
            If the probe has no deviations, or no attention where that counts, which is a fault of the caller.
        """
        deviation = required(probe.deviation, "KV deviations", self.name)
        if not self.by_attention:
            return deviation
        return deviation * required(probe.received, "attention sums", self.name)

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the `budget` positions with the highest scores."""
        return top_positions(probe.positions, self.score(probe), budget)


CACHEBLEND = KVDeviation("cacheblend")
"""CacheBlend as published, by gradual filtering: "slightly more" tokens than the budget at first, fewer layer by layer.
The paper leaves the numbers open; here it is 1.5, 1.25 and 1 times the budget after layers 1, 2 and 3."""

CACHEBLEND_RELEASED = KVDeviation("cacheblend_released", layers=(1,), keep=(1.0,))
"""CacheBlend as its code was released: one comparison, at layer 1, which takes the whole budget."""

KVSHARE = KVDeviation("kvshare", layers=(1,), keep=(1.0,), by_attention=True)
"""KVShare (Yang et al. 2025), known from one sentence only: it "scales KV deviation by initial attention weights", says
QCFuse's demonstration paper (section 2). Read here as the deviation of layer 1 times the attention received in layer 0.
The paper itself may have it otherwise."""
