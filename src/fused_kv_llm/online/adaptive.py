"""Adaptive recomputation: a request goes on recomputing as long as that still moves the beginning of its answer.

How far fused KV is off cannot be seen in the question's own rows: what matters is which tokens the answer leans on. So
a few tokens of the answer are drafted greedily after the first round. After every further round, which recomputes the
next tokens of the selector's ranking, the distributions along the draft are computed again. The KL divergence between
two rounds is an estimate of what a further one would change. The draft is thrown away: the answer is generated from the
final KV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_llm.selectors import Probe, Selector, budget_tokens, checked_selection

from .draft import Draft

__all__ = ["Adaptive", "Rounds", "round_ratios"]

_RATIOS = (0.05, 0.15, 0.3, 0.5, 0.7, 0.9)
"""Recomputation ratios of the rounds; two are the least between which anything can move."""


def round_ratios(most: float) -> tuple[float, ...]:
    """Return the ratios of a request's rounds, ascending.

    Parameters
    ----------
    most : float
        The last one, in (0, 1).
    """
    return (*(ratio for ratio in _RATIOS if ratio < most), most)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """How long a request goes on recomputing.

    Parameters
    ----------
    target : float
        Nats: it stops once a round has moved the answer's distributions by no more.
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
    selected : Tensor
        int64, ascending: the positions of the first round.
    draft : Draft

    Attributes
    ----------
    selected : Tensor
        int64, ascending: the positions of all rounds so far.
    earlier : Tensor
        Those of the rounds before the last one.
    ratio : float
        Of the last round.
    movement : float or None
        Nats by which it moved the draft; None before there are two.
    logits : Tensor
        Of the answer's first token, after the last round.
    """

    logits: Tensor

    def __init__(self, adaptive: Adaptive, selector: Selector, known: Probe, selected: Tensor, draft: Draft) -> None:
        self._target, self._selector, self._known, self._draft = adaptive.target, selector, known, draft
        first, *self._left = round_ratios(adaptive.most)
        self.ratio, self.selected, self.earlier = first, selected, selected[:0]
        self.movement: float | None = None

    @property
    def drafted_row(self) -> tuple[int, int] | None:
        """Position and id of the drafted token whose logits are wanted next; None if none are."""
        return self._draft.next_row()

    def goes_on(self) -> bool:
        """Whether the round that has been computed is to be judged, since another was before it or may come."""
        return self._draft.has_before or any(self._more(ratio).shape[0] for ratio in self._left)

    def take(self, logits: Tensor) -> Tensor | None:
        """Take logits ``[vocabulary]``: after the prompt, or after the token of the last :attr:`drafted_row`.

        Returns
        -------
        Tensor or None
            int64, ascending: the positions of the next round, none if this was the last one. None while the draft goes
            on.
        """
        if self._draft.is_new:
            self.logits = logits
        self._draft.take(logits)
        if self.drafted_row is not None:
            return None
        moved = self._draft.end_round()
        if moved is not None:
            self.movement = moved
        while self._left and (moved is None or moved > self._target):
            ratio = self._left.pop(0)
            if (more := self._more(ratio)).shape[0]:
                self.ratio, self.earlier = ratio, self.selected
                self.selected = torch.cat((self.selected, more)).sort().values
                return more
        return self.selected[:0]

    def _more(self, ratio: float) -> Tensor:
        """Return the positions that a ratio adds to those selected before."""
        budget = budget_tokens(ratio, self._known.positions.shape[0])
        more = checked_selection(self._selector, self._known, budget)
        return more[~torch.isin(more, self.selected)][: max(0, budget - self.selected.shape[0])]
