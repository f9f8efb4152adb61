"""The beginning of an answer, drafted to see how far further recomputation moves it."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

__all__ = ["DRAFT_TOKENS", "Draft"]

DRAFT_TOKENS = 8
"""Most positions at which distributions are compared: the first token's and those of seven drafted ones."""

LARGEST = 1e9
"""Nats that stand for a movement without bounds."""


class Draft:
    """The beginning of an answer as the KV of the first round has it, and how its distributions move.

    Parameters
    ----------
    num_prompt_tokens : int
        Position of the first drafted token.
    positions : int
        At how many distributions are compared, at least 1. A draft that ends before has fewer.
    end_ids : container of int
        Ids with which an answer ends.

    Attributes
    ----------
    entropy : float
        Mean entropy of the last two rounds' distributions, of the round in which it is larger, in nats.
    """

    entropy: float

    def __init__(self, num_prompt_tokens: int, positions: int, end_ids: Container[int] = ()) -> None:
        self._first, self._positions, self._end_ids = num_prompt_tokens, positions, end_ids
        self._ids: list[int] = []
        self._before: list[Tensor] = []
        self._now: list[Tensor] = []
        self._own_entropy = 0.0

    @property
    def is_new(self) -> bool:
        """Whether the next logits are those after the prompt."""
        return not self._now

    @property
    def has_before(self) -> bool:
        """Whether a round has been drafted before this one."""
        return bool(self._before)

    def take(self, logits: Tensor) -> None:
        """Take the logits ``[vocabulary]`` after the prompt, or those after the first of the :meth:`next_rows`.

        ``[rows, vocabulary]`` are those after as many of them.
        """
        for row in logits.reshape(-1, logits.shape[-1]):
            self._now.append(log_softmax(row.float(), dim=-1))
            if len(self._ids) < len(self._now):
                self._ids.append(int(row.argmax()))
                if self._ids[-1] in self._end_ids:
                    # What would come behind the end is never answered, and its movement says nothing.
                    self._positions = len(self._ids)

    def next_rows(self) -> tuple[list[int], list[int]]:
        """Return positions and ids of the tokens whose logits are wanted next, as far as they are known.

        The first round drafts token by token; later ones have them all. There are none if the prompt's logits are
        wanted, or nothing more.
        """
        done = len(self._now)
        ids = self._ids[done - 1 : self._positions - 1] if done else []
        return [self._first + done - 1 + number for number in range(len(ids))], ids

    def end_round(self) -> float | None:
        """Return the mean KL divergence of the last round's distributions from this one's, in nats.

        Returns
        -------
        float or None
            None after the first round.
        """
        before, self._before, self._now = self._before, self._now, []
        now = torch.stack(self._before)
        entropy = max(0.0, -float((now.exp() * now).nan_to_num(nan=0.0).sum(-1).mean()))
        self.entropy, self._own_entropy = max(self._own_entropy, entropy), entropy
        if not before:
            return None
        # Where both are impossible, as padding of the vocabulary is, the difference is no number.
        differences = kl_div(torch.stack(before), now, log_target=True, reduction="none")
        moved = float(differences.nan_to_num(nan=0.0, posinf=float("inf")).sum(-1).mean())
        return max(0.0, moved) if moved < float("inf") else LARGEST
