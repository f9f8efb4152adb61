"""The beginning of an answer, drafted to see how far further recomputation moves it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

__all__ = ["DRAFT_TOKENS", "Draft"]

DRAFT_TOKENS = 6
"""Positions at which the answer's distributions are compared: the first token's and those of five drafted ones."""

LARGEST = 1e9
"""Nats that stand for a movement without bounds."""


class Draft:
    """The beginning of an answer as the KV of the first round has it, and how its distributions move.

    Parameters
    ----------
    num_prompt_tokens : int
        Position of the first drafted token.
    positions : int
        At how many distributions are compared, at least 1.
    """

    def __init__(self, num_prompt_tokens: int, positions: int) -> None:
        self._first, self._positions = num_prompt_tokens, positions
        self._ids: list[int] = []
        self._before: list[Tensor] = []
        self._now: list[Tensor] = []

    @property
    def is_new(self) -> bool:
        """Whether the next logits are those after the prompt."""
        return not self._now

    @property
    def has_before(self) -> bool:
        """Whether a round has been drafted before this one."""
        return bool(self._before)

    def take(self, logits: Tensor) -> None:
        """Take the logits ``[vocabulary]`` after the prompt, or after the token of the last :meth:`next_row`."""
        self._now.append(log_softmax(logits.float(), dim=-1))
        if len(self._ids) < len(self._now):
            self._ids.append(int(logits.argmax()))

    def next_row(self) -> tuple[int, int] | None:
        """Return position and id of the token whose logits are wanted next; None if the prompt's are, or none."""
        done = len(self._now)
        return (self._first + done - 1, self._ids[done - 1]) if 0 < done < self._positions else None

    def end_round(self) -> float | None:
        """Return the mean KL divergence of the last round's distributions from this one's, in nats.

        Returns
        -------
        float or None
            None after the first round.
        """
        before, self._before, self._now = self._before, self._now, []
        if not before:
            return None
        now, then = torch.stack(self._before), torch.stack(before)
        # Where both are impossible, as padding of the vocabulary is, the difference is no number.
        moved = float(
            kl_div(then, now, log_target=True, reduction="none").nan_to_num(nan=0.0, posinf=float("inf")).sum(-1).mean()
        )
        return moved if moved < float("inf") else LARGEST
