"""The default: question attention that knows of attention sinks, with deviation transfer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError

from .base import Probe, required
from .budget import top_positions
from .views import Anchors, View

__all__ = ["SINK_ATTENTION_ANCHORS", "SINK_ATTENTION_VARIANTS", "SinkAttention"]


@dataclass(frozen=True, slots=True)
class SinkAttention:
    """Take the tokens with the highest question attention, the first ones of every chunk weighing more.

    The first tokens of a chunk were prefilled with less before them than they have in a prompt, and other tokens
    lean on them as sinks (EPIC): they deviate most. A token at offset ``o`` of its chunk scores
    ``a * (1 + w * exp(-o / t))``. ``a`` is the attention it receives from the question, which sees the whole context on
    its way (ProphetKV). It is averaged over heads and over two groups of layers, from a quarter to three fifths of the
    depth and from 8/15 to four fifths; ``a`` is the geometric mean of the two averages. Without context shifts later
    layers choose worse, so the first group scores alone. All tokens of a number get the best of their scores: an answer
    copies a number digit by digit, and the question points to one or two of the digits only.

    A part of the mean deviation of a chunk's recomputed tokens, its first four left out, is transferred to its others:
    half of it, or a quarter where KV has context shifts. There, more of it, or fitting the chunk's shift to those
    tokens first, lost most on the prompts that were worst already.

    Parameters
    ----------
    weight : float
        ``w``.
    tokens : float
        ``t``.
    full_context : bool
        Whether the question sees the chunks in the probe; with anchors, it sees these.
    transfer : float or None
        Share of the mean deviation that is transferred; None leaves it to :func:`.transfer_strength`.
    coverage : float
        Adaptive budget: stop once the selected tokens have this share of the sum of ``a`` over all chunk tokens, in
        (0, 1]; the ratio is the most that is recomputed then. 1 always spends the budget.
    name : str
    takes_variants : bool
        Whether it works on variants of chunks, see :class:`.VariantSelector`.
    alpha : float
        Scale of their overhead.
    anchors : Anchors or None
        What the question sees instead of the chunks, so that far less is read before recomputation begins (QCFuse,
        section 3.3).
    """

    weight: float = 8.0
    tokens: float = 10.0
    full_context: bool = True
    transfer: float | None = None
    coverage: float = 1.0
    name: str = "sink_attention"
    takes_variants: bool = False
    alpha: float = 1.0
    anchors: Anchors | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.coverage <= 1.0:
            raise ConfigError(f"coverage={self.coverage!r} is outside (0, 1]: 1 spends the whole budget")

    def view(self, num_layers: int) -> View:
        """Return the layers from a quarter to four fifths of the depth, in two groups.

        Of a model with windows, only layers without one choose, at least two of each group (docs/methods.md).
        """
        early = _one_at_least(num_layers // 4, 3 * num_layers // 5)
        late = _one_at_least(8 * num_layers // 15, 4 * num_layers // 5)
        both, sees_all = tuple(sorted({*early, *late})), self.full_context and self.anchors is None
        return View(both, sees_all, self.anchors, groups=(early, late), plain_layers=early)

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the `budget` positions with the highest scores, or as many of them as cover the attention.

        Raises
        ------
        FusedKVError
            If the probe carries no scores, which is a fault of the caller.
        """
        scores, weighted = self._scores(probe), self.score(probe)
        if self.coverage < 1.0:
            ranked = torch.sort(weighted, descending=True, stable=True).indices
            covered = scores[ranked].cumsum(0) / scores.sum()
            budget = min(budget, 1 + int((covered < self.coverage).sum()))
        return top_positions(probe.positions, weighted, budget)

    def score(self, probe: Probe) -> Tensor:
        """Return float32 ``[C]``, the attention with the weight of a chunk's first tokens; raises as :meth:`select`.

        All tokens of a number have the best of their scores.
        """
        scores = self._scores(probe) * (1 + self.weight * torch.exp(-probe.offset.float() / self.tokens))
        return scores if probe.numbers is None or not scores.numel() else _whole_numbers(scores, probe.numbers)

    def _scores(self, probe: Probe) -> Tensor:
        return required(probe.scores, "question attention scores", self.name)


def _whole_numbers(scores: Tensor, numbers: Tensor) -> Tensor:
    """Give all tokens of a number the best of their scores."""
    best = scores.new_zeros(int(numbers.max()) + 2).scatter_reduce(0, numbers + 1, scores, "amax")
    return torch.where(numbers < 0, scores, best[numbers + 1])


def _one_at_least(first: int, stop: int) -> tuple[int, ...]:
    return tuple(range(first, max(first + 1, stop)))


SINK_ATTENTION_VARIANTS = SinkAttention(name="sink_attention_variants", takes_variants=True)
SINK_ATTENTION_ANCHORS = SinkAttention(
    name="sink_attention_anchors", anchors=Anchors("sink", 1.0, "int4", shifted=True)
)
"""The default, its probe seeing a copy of every chunk in four bits: less than a quarter of the bytes of KV in bfloat16
are read before recomputation begins."""
