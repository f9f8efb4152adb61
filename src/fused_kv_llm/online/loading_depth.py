"""How many layers must be in memory before a request starts, so that it need not wait for the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

__all__ = ["MovingAverage", "Progress", "loading_depth", "may_begin"]

# The newest value's share: some ten requests are remembered.
_NEWEST = 0.2
# A depth that is a whole number but for rounding is that number.
_ROUNDING = 1e-9


def loading_depth(num_layers: int, load_s: float, compute_s: float) -> int:
    """Return how many layers to load first (Cache-Craft section 3.4.2, equation 16 and algorithm 2).

    ``L_p = (L - 1) (1 - T_prefill / T_load) + 1``, rounded up, and at least 1. Layers are loaded one after another, and
    computed one after another. Then the last layer is there when the one before it has been computed, and no layer
    waits once the first one has begun; with one layer less, one would. Beginning sooner would end no sooner.

    Parameters
    ----------
    num_layers : int
        ``L``, at least 1.
    load_s : float
        Seconds to load a layer: ``T_load / L``.
    compute_s : float
        Seconds to compute a layer: ``T_prefill / L``; infinite where it is not known.

    Returns
    -------
    int
        Layers, from 1 to `num_layers`.
    """
    if load_s <= compute_s:
        return 1
    return math.ceil((num_layers - 1) * (1.0 - compute_s / load_s) + 1.0 - _ROUNDING)


class Progress(Protocol):
    """How far loading is, see :class:`.load_ahead.LoadAhead`."""

    present: int

    @property
    def is_over(self) -> bool:
        """Whether nothing more is loaded."""


def may_begin(load: Progress | None, depth: Callable[[], int], *, alone: bool) -> bool:
    """Return whether a request can be computed: without waiting for layers, unless nobody else is kept waiting.

    Parameters
    ----------
    load : Progress or None
        None if nothing has to be loaded.
    depth : callable
        How many layers must be there before it begins alone, see :func:`loading_depth`.
    alone : bool
        Whether no other request is being answered.
    """
    if load is None or load.is_over:
        return True
    return alone and load.present >= depth()


class MovingAverage:
    """An average in which newer values count more; written by one thread.

    Attributes
    ----------
    value : float or None
        None before anything was added.
    """

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Add a value."""
        self.value = value if self.value is None else (1.0 - _NEWEST) * self.value + _NEWEST * value
