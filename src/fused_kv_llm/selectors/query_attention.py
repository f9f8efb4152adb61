"""Query-attention selection: recompute the tokens that the question attends to.

One rule with a few parameters covers three published selectors (the presets below): how much of the context the
question sees on its way through the layers, and which layers' attention is averaged. In QCFuse's numbers, with the
question U, the context C of N tokens and a ratio rho:

- (10) ``I(t) = sum over all layers l of Attn_l(Q_U, K_C)_t``: `prophetkv`. FusionRAG (section 3.2) has the last layer
  only, each column of the attention summed over the question's rows: `fusionrag`.
- (18, 20) ``I(t) = sum over l in L* of Attn_l(Q_U(C_A), K_C)_t``, where the question has seen the anchors ``C_A`` (15
  to 17) and ``L*`` has the layers of the best recall (19): `qcfuse`.
- (11) ``P = TopK(I(t), floor(rho N))``. Means over rows, heads and layers stand for the sums: they rank alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fused_kv_llm.errors import ConfigError

from .base import Probe, required
from .budget import top_positions
from .views import Anchors, View

__all__ = ["ALL_LAYERS", "FUSIONRAG", "MIDDLE_LAYERS", "PROPHETKV", "QCFUSE", "QueryAttention"]

_LAYERS = ("last", "all", "middle", "critical")


@dataclass(frozen=True, slots=True)
class QueryAttention:
    """Take the tokens with the highest mean question-to-token attention.

    Scores are softmax weights with the full denominator over prefix, chunks and question, at true positions,
    averaged over the question's tokens, the heads and the chosen layers; the budget is one global top-k.

    Parameters
    ----------
    name : str
        Name under which the preset is chosen and reported.
    layers : {"last", "all", "middle", "critical"} or tuple of int
        Layers whose attention counts; the critical ones are known by model (:mod:`.profiles`).
    full_context : bool
        Whether the question attends to the chunks' stored KV in the probe.
    anchors : Anchors or None
        Tokens of the chunks it attends to instead.
    profiled : bool
        Whether anchors that were profiled for the model come before these (:mod:`.profiles`).
    floor : float
        Share of its proportional part of the budget that every chunk gets in any case, in [0, 1].

    Raises
    ------
    ConfigError
        If there are no such layers, the floor is out of range, or both anchors and the whole context are asked for;
        from :meth:`view`, if the model has fewer layers.
    """

    name: str
    layers: Literal["last", "all", "middle", "critical"] | tuple[int, ...]
    full_context: bool = False
    anchors: Anchors | None = None
    floor: float = 0.0
    profiled: bool = False

    def __post_init__(self) -> None:
        if not self.layers or not (isinstance(self.layers, tuple) or self.layers in _LAYERS):
            raise ConfigError(f"layers={self.layers!r}: use one of {', '.join(_LAYERS)}, or a tuple of layer numbers")
        if not 0.0 <= self.floor <= 1.0:
            raise ConfigError(f"floor={self.floor!r} is outside [0, 1]: 1 gives every chunk its proportional part")
        if self.full_context and self.anchors is not None:
            raise ConfigError("full_context=True and anchors exclude each other: the question sees one or the other")

    def view(self, num_layers: int) -> View:
        """Return the layers to look at in a model of `num_layers` layers."""
        if isinstance(self.layers, tuple):
            missing = [layer for layer in self.layers if not -num_layers <= layer < num_layers]
            if missing:
                raise ConfigError(f"layers={missing} of the selector {self.name!r}: the model has {num_layers} layers")
            layers = tuple(sorted({layer % num_layers for layer in self.layers}))
        elif self.layers == "last":
            layers = (num_layers - 1,)
        elif self.layers == "all":
            layers = tuple(range(num_layers))
        elif self.layers == "critical":
            layers = ()
        else:
            first = max(0, num_layers // 2 - 2)
            layers = tuple(range(first, min(first + 4, num_layers)))
        return View(layers, self.full_context, self.anchors, self.layers == "critical", self.profiled)

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the `budget` positions with the highest scores.

        Raises
        ------
        FusedKVError
            If the probe carries no scores, which is a fault of the caller.
        """
        scores = required(probe.scores, "question attention scores", self.name)
        return top_positions(probe.positions, scores, budget, chunk_index=probe.chunk_index, floor=self.floor)


FUSIONRAG = QueryAttention("fusionrag", layers="last")
"""FusionRAG section 3.2: the question alone is prefilled, its last layer's queries score the chunks."""

PROPHETKV = QueryAttention("prophetkv", layers="all", full_context=True)
"""ProphetKV as QCFuse section 3.1 describes it: the question attends to the full context, all layers count."""

QCFUSE = QueryAttention("qcfuse", layers="critical", anchors=Anchors("kvzip", 0.1), profiled=True)
"""QCFuse sections 3.3 and 3.4: the question attends to 10% of every chunk, ranked by KVzip unless another rule or ratio
was profiled for the model, and the model's three critical layers score the chunks."""

MIDDLE_LAYERS = QueryAttention("middle_layers", layers="middle")
"""Four middle layers, where QCFuse section 3.3 finds most critical layers."""

ALL_LAYERS = QueryAttention("all_layers", layers="all")
"""FusionRAG's probe with ProphetKV's layers: the question is prefilled alone, so that the probe stays cheap, and
every layer scores the chunks. It measured closer to full prefill than any of the above."""
