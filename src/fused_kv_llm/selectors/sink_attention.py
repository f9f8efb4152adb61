"""The default: question attention that knows of attention sinks, with deviation transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fused_kv_llm.errors import FusedKVError

from .base import Probe
from .budget import top_positions
from .views import View

__all__ = ["SinkAttention"]


@dataclass(frozen=True, slots=True)
class SinkAttention:
    """Take the tokens with the highest question attention, the first ones of every chunk weighing more.

    The first tokens of a chunk were prefilled with less before them than they have in a prompt, and other tokens
    lean on them as sinks (EPIC): they deviate most. A token at offset ``o`` of its chunk scores
    ``a * (1 + w * exp(-o / t))``, where ``a`` is the attention it receives from the question, mean over all layers and
    heads, the question seeing the whole context on its way (ProphetKV). Half of the mean deviation of a chunk's
    recomputed tokens is transferred to its others.

    Parameters
    ----------
    weight : float
        ``w``.
    tokens : float
        ``t``.
    full_context : bool
        Whether the question sees the chunks in the probe.
    transfer : float
        Share of the mean deviation that is transferred.
    """

    name: ClassVar[str] = "sink_attention"
    weight: float = 16.0
    tokens: float = 10.0
    full_context: bool = True
    transfer: float = 0.5

    def view(self, num_layers: int) -> View:
        """Return all layers."""
        return View(tuple(range(num_layers)), self.full_context)

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the `budget` positions with the highest scores.

        Raises
        ------
        FusedKVError
            If the probe carries no scores, which is a fault of the caller.
        """
        if probe.scores is None:
            raise FusedKVError(f"The selector {self.name!r} needs question attention scores, but the probe has none.")
        early = torch.exp(-probe.offset.float() / self.tokens)
        return top_positions(probe.positions, probe.scores * (1 + self.weight * early), budget)
