"""Forwards that are left between two layers and gone on with later, so that a long prompt leaves time for others.

transformers runs all layers in one go. A pass that may be left says so in its ``pausing``: the decoder layers that know
of it (:mod:`.decoder_layer`) are computed until its time is over, and the forward ends with an error that carries
nothing. When it is run again, layers that were computed hand on what the last of them gave. What comes out is the same,
bit for bit, wherever it was left.
"""

from __future__ import annotations

import time

from torch import Tensor

__all__ = ["PausedError", "Pausing"]


class PausedError(Exception):
    """A forward was left between two layers; run with the same pass, it goes on there."""


class Pausing:
    """When a forward is left, and what it goes on with.

    Attributes
    ----------
    at_s : float
        ``time.perf_counter()`` at which it is left. It is left earlier if the next layer, taking as long as the one
        before it, would end later; but one layer is always computed.
    hidden : Tensor or None
        ``[1, R, H]``: what the last layer gave before the forward was left; None if it was not.
    """

    def __init__(self) -> None:
        self.at_s = float("inf")
        self.hidden: Tensor | None = None
        self._began_s = 0.0

    def enter(self) -> None:
        """Note that a layer begins to compute."""
        self._began_s, self.hidden = time.perf_counter(), None

    def leave(self, hidden: Tensor) -> Tensor:
        """Return what a layer gave, if there is time for the next one.

        Raises
        ------
        PausedError
            If there is not.
        """
        now_s = time.perf_counter()
        if 2 * now_s - self._began_s > self.at_s:
            self.hidden = hidden
            raise PausedError
        return hidden
