"""How many tokens may be recomputed, and how a budget is divided."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["allocate", "budget_tokens", "top_positions"]


def budget_tokens(ratio: float, num_tokens: int) -> int:
    """Return how many of `num_tokens` chunk tokens a recomputation ratio allows.

    At least one token for a positive ratio, as QCFuse's released configuration has it.
    """
    if ratio <= 0.0 or num_tokens == 0:
        return 0
    return min(num_tokens, max(1, int(ratio * num_tokens)))


def top_positions(
    positions: Tensor, scores: Tensor, budget: int, *, chunk_index: Tensor | None = None, floor: float = 0.0
) -> Tensor:
    """Return the positions of the `budget` highest scores, ascending; of equal scores the earlier wins.

    Parameters
    ----------
    positions : Tensor
        int64 ``[C]``, ascending.
    scores : Tensor
        float32 ``[C]``.
    budget : int
    chunk_index : Tensor or None
        int64 ``[C]``, needed for a floor.
    floor : float
        Share of a chunk's proportional part of the budget that it gets whatever the other chunks score, in
        [0, 1]: 0 is one global top-k, 1 gives every chunk its part.
    """
    if chunk_index is not None and floor > 0.0:
        sizes = torch.bincount(chunk_index)
        part = (floor * budget * sizes.double() / positions.shape[0]).long()
        scores = torch.where(_ranks_in_chunk(scores, chunk_index) < part[chunk_index], torch.inf, scores)
    ranked = torch.sort(scores, descending=True, stable=True).indices[:budget]
    return positions[ranked].sort().values


def allocate(budget: int, weights: Tensor, sizes: Tensor) -> Tensor:
    """Divide a budget over chunks in proportion to their weights, no chunk above its size.

    Parameters
    ----------
    budget : int
        At most ``sizes.sum()``.
    weights : Tensor
        float ``[K]``, not negative; where all are zero, all count alike.
    sizes : Tensor
        int64 ``[K]``.

    Returns
    -------
    Tensor
        int64 ``[K]`` that sums to `budget`: largest remainders are rounded up, the earlier first.
    """
    # A trace of weight for all, so that what full chunks cannot take goes to those of weight zero.
    share = weights.double() + 1e-9 * max(float(weights.max()), 1e-9)
    full = torch.zeros_like(sizes, dtype=torch.bool)
    wanted = torch.zeros_like(share)
    while not bool(full.all()):
        left = budget - int(sizes[full].sum())
        wanted = torch.where(full, sizes.double(), left * share / share[~full].sum())
        if not bool((over := (wanted >= sizes) & ~full).any()):
            break
        full |= over
    wanted = torch.minimum(wanted, sizes.double())
    given = wanted.long()
    remainder = torch.where(given < sizes, wanted - given, -1.0)
    given[torch.sort(remainder, descending=True, stable=True).indices[: budget - int(given.sum())]] += 1
    return given


def _ranks_in_chunk(scores: Tensor, chunk_index: Tensor) -> Tensor:
    """Return how many tokens of its own chunk score higher, or equally and stand earlier."""
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[torch.sort(chunk_index[order], stable=True).indices]
    sizes = torch.bincount(chunk_index)
    starts = (sizes.cumsum(0) - sizes)[chunk_index[order]]
    ranks = torch.empty_like(chunk_index)
    ranks[order] = torch.arange(order.shape[0]) - starts
    return ranks
