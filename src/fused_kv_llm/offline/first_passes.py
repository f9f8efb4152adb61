"""First passes go before second ones: a question waits for the first, and the second only makes its answer better."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fused_kv_llm.model import ModelOwner, OfModel, StoppedError

__all__ = ["AfterFirstPasses", "FirstPasses", "first_passes_of"]

T = TypeVar("T")

_POLL_S = 0.05


class FirstPasses:
    """The first passes that are under way with one model, whichever engines have it."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Have none under way: a forked process has not the threads that compute them."""
        self._changed, self._under_way = threading.Condition(), 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Have second passes wait for what is computed meanwhile."""
        with self._changed:
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def wait(self, stopped: Callable[[], bool]) -> None:
        """Return when none is under way.

        Parameters
        ----------
        stopped : callable
            Says whether to give up waiting.

        Raises
        ------
        StoppedError
            If it does.
        """
        with self._changed:
            while not self._changed.wait_for(lambda: not self._under_way, _POLL_S):
                if stopped():
                    raise StoppedError


class AfterFirstPasses:
    """A model's owner whose pieces wait until no first pass is under way.

    Parameters
    ----------
    owner : ModelOwner
        Computes the pieces.
    passes : FirstPasses
    """

    def __init__(self, owner: ModelOwner, passes: FirstPasses) -> None:
        self._owner, self._passes = owner, passes

    def run(self, work: Callable[[], T], num_tokens: int = 0, stopped: Callable[[], bool] = lambda: False) -> T:
        """Wait for the owner's turn and compute; as the owner does."""
        self._passes.wait(stopped)
        return self._owner.run(work, num_tokens, stopped)

    def piece_tokens(self, most: int) -> int:
        """Return how many tokens a piece may compute now, at most `most`; as the owner does."""
        return self._owner.piece_tokens(most)


_passes = OfModel(lambda model: FirstPasses())


def first_passes_of(model: Any) -> FirstPasses:
    """Return the first passes of a transformers model; engines that share its weights share them."""
    return _passes(model)
