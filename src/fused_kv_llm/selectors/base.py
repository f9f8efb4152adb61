"""What a selector is told, what it answers, and the view of the context it needs first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError

__all__ = ["Probe", "Selector", "View", "budget_tokens", "checked_selection", "top_positions"]


@dataclass(frozen=True, slots=True)
class View:
    """What the probe must look at before a selector can decide.

    Parameters
    ----------
    layers : tuple of int
        Layers whose question-to-context attention is needed; empty for a selector that needs no probe.
    full_context : bool
        Whether the question attends to the chunks' stored KV on its way through the layers (anchor ratio 1)
        or only to the prompt's header and itself (anchor ratio 0).
    """

    layers: tuple[int, ...] = ()
    full_context: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """What a selector knows about one request.

    Parameters
    ----------
    positions : Tensor
        int64 ``[C]``, ascending prompt positions of the chunk tokens whose stored KV could be reused.
    chunk_index : Tensor
        int64 ``[C]``, which chunk of the prompt each belongs to: 0, 1, ...
    offset : Tensor
        int64 ``[C]``, how many reusable tokens of its chunk stand before it.
    scores : Tensor or None
        float32 ``[C]``, mean question-to-token attention over the view's layers; None without a view.
    seed : int
        For selectors that draw.
    """

    positions: Tensor
    chunk_index: Tensor
    offset: Tensor
    scores: Tensor | None = None
    seed: int = field(default=0)


@runtime_checkable
class Selector(Protocol):
    """A rule that picks the chunk tokens to recompute."""

    @property
    def name(self) -> str:
        """Name under which it is chosen and reported."""

    def view(self, num_layers: int) -> View:
        """Return what it needs to see of a model with `num_layers` layers."""

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return int64 positions, ascending, all in ``probe.positions``, at most `budget` of them."""


def budget_tokens(ratio: float, num_tokens: int) -> int:
    """Return how many of `num_tokens` chunk tokens a recomputation ratio allows.

    At least one token for a positive ratio, as QCFuse's released configuration has it.
    """
    if ratio <= 0.0 or num_tokens == 0:
        return 0
    return min(num_tokens, max(1, int(ratio * num_tokens)))


def top_positions(positions: Tensor, scores: Tensor, budget: int) -> Tensor:
    """Return the positions of the `budget` highest scores, ascending; of equal scores the earlier wins."""
    ranked = torch.sort(scores, descending=True, stable=True).indices[:budget]
    return positions[ranked].sort().values


def checked_selection(selector: Selector, probe: Probe, budget: int) -> Tensor:
    """Return what a selector picks.

    Parameters
    ----------
    selector : Selector
    probe : Probe
    budget : int
        Tokens it may pick.

    Returns
    -------
    Tensor
        int64 ``[<= budget]``, ascending, all in ``probe.positions``.

    Raises
    ------
    ConfigError
        If it picks anything else: positions outside the chunks would corrupt the prompt's KV.
    """
    selected = selector.select(probe, budget)
    valid = (
        isinstance(selected, Tensor)
        and selected.dtype == torch.int64
        and selected.dim() == 1
        and selected.shape[0] <= budget
        and bool((selected.diff() > 0).all())
        and bool(torch.isin(selected, probe.positions).all())
    )
    if not valid:
        shown = f"{selected.dtype} {tuple(selected.shape)}" if isinstance(selected, Tensor) else repr(selected)[:60]
        raise ConfigError(
            f"The selector {selector.name!r} returned {shown}: it must return at most {budget} int64 positions, "
            "ascending, without duplicates, all of them in probe.positions."
        )
    return selected
