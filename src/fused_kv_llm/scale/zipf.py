"""How much of Zipf-distributed use a cache of the last used catches, by Che's approximation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.errors import ConfigError

__all__ = ["lru_hit_share"]

# Ranks up to this one are counted singly, those behind it in groups that grow by a percent.
_SINGLE = 2000
_GROWTH = 1.01
_HALVINGS = 200


def lru_hit_share(items: int, exponent: float, held: float) -> float:
    """Return the share of uses that find their item among those last used.

    Uses are independent, and rank r has a share proportional to ``1 / r**exponent``. An item is held if it was used
    within the time T in which as many different items are used as fit (Che, Tung and Wang, 2002, section III).

    Parameters
    ----------
    items : int
        That there are.
    exponent : float
        0 for even use.
    held : float
        Items that fit.

    Returns
    -------
    float

    Raises
    ------
    ConfigError
        If there are no items, or the exponent is negative.
    """
    if items < 1 or exponent < 0:
        raise ConfigError(f"items={items!r} and exponent={exponent!r} must be at least 1 and 0.")
    if held >= items:
        return 1.0
    if held <= 0:
        return 0.0
    ranks, counts = _groups(items)
    share = ranks**-exponent
    share /= float(np.dot(share, counts))
    low, high = 0.0, 1.0
    while np.dot(counts, -np.expm1(-share * high)) < held:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.dot(counts, -np.expm1(-share * middle)) < held else (low, middle)
    return float(np.dot(counts * share, -np.expm1(-share * high)))


def _groups(items: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the middle rank and the number of items of each group."""
    edges = [float(rank) for rank in range(1, min(items, _SINGLE) + 1)]
    while edges[-1] < items:
        edges.append(min(float(items), float(np.floor(edges[-1] * _GROWTH) + 1)))
    starts = np.array([*edges, items + 1.0])
    starts = np.unique(starts)
    counts = np.diff(starts)
    return starts[:-1] + (counts - 1) / 2, counts
