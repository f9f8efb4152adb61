"""How far two computations of the same keys and values are apart, and how far rounding may bring them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Deviation", "by_layer", "deviation", "tolerance", "worst"]

# Between two computations of the same, in the first layer. Of SmolLM2 (30 layers) 1e-6, 0.001 and 0.01 were measured
# there at most; rounding adds up on the way, about as the square root of the number of layers.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# Between the same tokens at two places, in any layer. A wrong rotation or mask causes a deviation of about 1.
_MOVING = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.2}


class Deviation(NamedTuple):
    """The layer whose deviation exceeds its tolerance by most."""

    layer: int
    deviation: float
    tolerated: float


def tolerance(dtype: torch.dtype) -> float:
    """Return the deviation that rounding may cause between the same tokens at two places, whatever the layer."""
    return _MOVING[dtype]


def deviation(got: Tensor, want: Tensor) -> Tensor:
    """Return how far tokens are off, relative to their size.

    Parameters
    ----------
    got, want : Tensor
        ``[..., n, D]``.

    Returns
    -------
    Tensor
        float32 ``[...]``: of the token in the middle. Rounding can throw single tokens off: those that attention rests
        on, or that it sends to other experts.
    """
    gap = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp_min(1e-6)
    middle: Tensor = gap.nan_to_num(nan=math.inf).median(dim=-1).values
    return middle


def by_layer(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Return how far tensors are apart, relative to their size.

    Parameters
    ----------
    pairs : iterable of (Tensor, Tensor)
        ``[heads, tokens, D]``, one pair after the other.

    Returns
    -------
    list of float
        As :func:`deviation` gives it for tokens over all heads.
    """
    return [float(deviation(*(part.transpose(0, 1).flatten(1) for part in pair))) for pair in pairs]


def worst(
    deviations: Sequence[float], dtype: torch.dtype, *, layers: Sequence[int] = (), floors: Sequence[float] = ()
) -> Deviation | None:
    """Return the worst deviation that is more than rounding; None if all are rounding.

    Parameters
    ----------
    deviations : sequence of float
        From :func:`by_layer`.
    dtype : torch.dtype
        What was computed in.
    layers : sequence of int
        The layer of each; by default all are the first.
    floors : sequence of float
        What is tolerated of each at least, where more is known of the rounding.
    """
    places = layers or [0] * len(deviations)
    beyond = [
        Deviation(layer, found, max(floor, _ROUNDING[dtype] * math.sqrt(layer + 1)))
        for layer, found, floor in zip(places, deviations, floors or [0.0] * len(deviations), strict=True)
    ]
    furthest = max(beyond, key=lambda one: one.deviation / one.tolerated)
    return furthest if furthest.deviation > furthest.tolerated else None
