"""Adaptive recomputation: a request goes on recomputing until its answer is expected to be near full prefill's.

How far fused KV is off cannot be seen in the question's own rows: what matters is which tokens the answer leans on. So
a few tokens of the answer are drafted greedily over the stored KV, before anything of the chunks is recomputed. After
every round, which takes more tokens of the selector's ranking and recomputes all it has, the distributions along the
draft are computed again. The KL divergence between two rounds, and how open the distributions are, say how far full
prefill's would be (:func:`expected_after`). The draft is thrown away: the answer is generated from the final KV.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.selectors import Probe, Selector, budget_tokens, checked_selection

from .draft import Draft

__all__ = ["Adaptive", "Rounds", "expected_after", "round_ratios"]

_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Recomputation ratios of the rounds behind the first, which recomputes nothing of the chunks."""

_NEAREST = 0.8
"""A round before the last one has at most this share of the last one's ratio."""

_SCALE, _DECAY, _MOVED, _OPEN = 0.1, 2.8, 0.45, 0.66
"""``c``, ``d``, ``a`` and ``b`` of :func:`expected_after`."""

_LEAST = 0.1
"""Share of what a round has moved that is expected to be left in any case."""


def round_ratios(most: float) -> tuple[float, ...]:
    """Return the ratios of a request's rounds behind the first, ascending.

    None is close to the last one: a short step moves the distributions little, however far they still are.

    Parameters
    ----------
    most : float
        The last one, in (0, 1).
    """
    return (*(ratio for ratio in _RATIOS if ratio <= _NEAREST * most), most)


def expected_after(ratio: float, moved: float, entropy: float) -> float:
    """Return how far fused distributions are expected to be from full prefill's after a round.

    ``max(c exp(-d r) M^a H^b, M / 10)``: open distributions are moved more by the same errors, and what a round has
    moved says something about what is left, also where a certain answer became a certain other one. The numbers were
    fitted by least squares of logarithms to 224 prompts with SmolLM2-135M: docs/experiments.md, "Estimates of a round".

    Parameters
    ----------
    ratio : float
        ``r``, recomputed so far.
    moved : float
        ``M``, nats: mean KL divergence of the distributions from those of the round before.
    entropy : float
        ``H``, nats: their mean entropy, before the round or after it, whichever is larger.

    Returns
    -------
    float
        Nats: a mean KL divergence.
    """
    return max(_SCALE * math.exp(-_DECAY * ratio) * float(moved**_MOVED * entropy**_OPEN), _LEAST * moved)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """How long a request goes on recomputing.

    Parameters
    ----------
    target : float
        Nats: it stops once the answer's distributions are expected to be no farther from full prefill's.
    most : float
        The ratio at which it stops in any case, in (0, 1).
    """

    target: float
    most: float


class Rounds:
    """The rounds of one request.

    Parameters
    ----------
    adaptive : Adaptive
    selector : Selector
        Ranks the tokens.
    known : Probe
        What it goes by.
    draft : Draft

    Attributes
    ----------
    selected : Tensor
        int64, ascending: the positions of all rounds so far; the first has none.
    ratio : float
        Of the last round.
    expected : float or None
        Nats that the draft's distributions are expected to be from full prefill's; None after the first round.
    logits : Tensor
        Of the answer's first token, after the last round.
    """

    logits: Tensor

    def __init__(self, adaptive: Adaptive, selector: Selector, known: Probe, draft: Draft) -> None:
        self._target, self._selector, self._known, self._draft = adaptive.target, selector, known, draft
        self._left, self.ratio, self.selected = list(round_ratios(adaptive.most)), 0.0, known.positions[:0]
        self.expected: float | None = None

    @property
    def drafted_rows(self) -> tuple[list[int], list[int]]:
        """Positions and ids of the drafted tokens whose logits are wanted next; empty if none are."""
        return self._draft.next_rows()

    def goes_on(self) -> bool:
        """Whether the round that has been computed is to be judged, since another was before it or may come."""
        return self._draft.has_before or any(self._more(ratio).shape[0] for ratio in self._left)

    def take(self, logits: Tensor) -> bool | None:
        """Take logits ``[vocabulary]`` after the prompt, or ``[rows, vocabulary]`` after the first drafted rows.

        Returns
        -------
        bool or None
            Whether another round begins, of the positions that are `selected` now. None while the draft goes on.
        """
        if self._draft.is_new:
            self.logits = logits
        self._draft.take(logits)
        if self.drafted_rows[0]:
            return None
        moved = self._draft.end_round()
        if moved is not None:
            self.expected = expected_after(self.ratio, moved, self._draft.entropy)
        while self._left and (self.expected is None or self.expected > self._target):
            ratio = self._left.pop(0)
            if (more := self._more(ratio)).shape[0]:
                self.ratio, self.selected = ratio, torch.cat((self.selected, more)).sort().values
                return True
        return False

    def _more(self, ratio: float) -> Tensor:
        """Return the positions that a ratio adds to those selected before."""
        budget = budget_tokens(ratio, self._known.positions.shape[0])
        more = checked_selection(self._selector, self._known, budget)
        return more[~torch.isin(more, self.selected)][: max(0, budget - self.selected.shape[0])]
