"""How attention turns products of queries and keys into weights: the scale, a soft cap, sinks, and windows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Scoring", "check_first_keys"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What happens to a row's products before and in the softmax.

    Parameters
    ----------
    scale : float
        Multiplies the products: these are the scores.
    softcap : float or None
        Scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
    sinks : Tensor or None
        ``[Hq]``: one more score for each query head in the softmax's denominator, without a value (gpt-oss). It is
        neither scaled nor capped. Minus infinity is none.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but the scale."""
        return self.softcap is None and self.sinks is None

    def check(self, q_heads: int, device: torch.device) -> None:
        """Refuse what is no cap, and sinks of other heads or on another device than the queries.

        Raises
        ------
        ValueError
            If one is wrong.
        """
        if self.softcap is not None and not (0.0 < self.softcap < math.inf):
            msg = f"softcap={self.softcap} must be positive and finite; None is no cap"
            raise ValueError(msg)
        if self.sinks is not None and (self.sinks.shape != (q_heads,) or self.sinks.device != device):
            msg = (
                f"sinks {list(self.sinks.shape)} on {self.sinks.device} are not one for each of {q_heads} query heads "
                f"on {device}"
            )
            raise ValueError(msg)

    def capped_(self, scores: Tensor) -> Tensor:
        """Return scores, which are scaled, with the cap applied in place."""
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def kept_share(self, scores: Tensor, sinks: Tensor) -> Tensor:
        """Return which share of its softmax a row keeps beside its sink.

        Parameters
        ----------
        scores : Tensor
            ``[..., N]``, capped, minus infinity where unseen.
        sinks : Tensor
            The rows' sinks in float32, of a shape that broadcasts to ``[..., 1]``.

        Returns
        -------
        Tensor
            float32 ``[..., 1]``: ``sum exp(scores) / (exp(sink) + sum exp(scores))``.
        """
        return torch.sigmoid(scores.float().logsumexp(-1, keepdim=True) - sinks)


def check_first_keys(first_keys: Tensor, q_positions: Tensor) -> None:
    """Refuse windows that begin before the keys or behind their row.

    Parameters
    ----------
    first_keys : Tensor
        int64 ``[R]``: the first key that each row sees.
    q_positions : Tensor
        int64 ``[R]``: the last one.

    Raises
    ------
    ValueError
        If there is not one for each row, or one lies outside ``0 .. q_positions[i]``.
    """
    if first_keys.shape != q_positions.shape or first_keys.device != q_positions.device:
        msg = (
            f"first_keys {list(first_keys.shape)} on {first_keys.device} are not one for each of the positions "
            f"{list(q_positions.shape)} on {q_positions.device}"
        )
        raise ValueError(msg)
    wrong = ((first_keys < 0) | (first_keys > q_positions)).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        msg = f"first_keys[{row}]={int(first_keys[row])} must lie in 0..{int(q_positions[row])}, its row's position"
        raise ValueError(msg)
