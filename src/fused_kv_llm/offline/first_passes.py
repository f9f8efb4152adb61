"""First passes go before second ones: a question waits for the first, and the second only makes its answer better."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fused_kv_llm.model import ModelOwner, OfModel, PieceSpeed, StoppedError
from fused_kv_llm.thread_pool import release_openmp_workers

__all__ = ["AfterFirstPasses", "FirstPasses", "first_passes_of"]

T = TypeVar("T")

_POLL_S = 0.05


class FirstPasses:
    """The first passes that are under way with one model, whichever engines have it."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Have none under way: a forked process has not the threads that compute them."""
        self._changed, self._under_way = threading.Condition(), set[object]()

    @property
    def are_under_way(self) -> bool:
        """Whether second passes wait now."""
        return bool(self._under_way)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Have second passes wait for what is computed meanwhile; it may be entered within itself."""
        # A number would be wrong for ever in a process that was forked meanwhile, or after Ctrl-C before `try`.
        one = object()
        try:
            with self._changed:
                self._under_way.add(one)
            yield
        finally:
            with self._changed:
                self._under_way.discard(one)
                self._changed.notify_all()

    def wait(self, stopped: Callable[[], bool]) -> None:
        """Return when none is under way.

        Raises
        ------
        StoppedError
            If `stopped` says to give up waiting.
        """
        if not self.are_under_way:
            return
        # The caller's own OpenMP workers would slow down what it waits for.
        release_openmp_workers()
        with self._changed:
            while not self._changed.wait_for(lambda: not self._under_way, _POLL_S):
                if stopped():
                    raise StoppedError


class AfterFirstPasses:
    """A model's owner for one second pass: its pieces wait until no first pass is under way.

    Parameters
    ----------
    owner : ModelOwner
        Computes the pieces.
    passes : FirstPasses
    stopped : callable
        Says whether to give up waiting for first passes, with :class:`.StoppedError`.
    """

    def __init__(self, owner: ModelOwner, passes: FirstPasses, stopped: Callable[[], bool]) -> None:
        self._owner, self._passes, self._stopped = owner, passes, stopped

    def run(self, work: Callable[[], T], num_tokens: int = 0, stopped: Callable[[], bool] = lambda: False) -> T:
        """Wait for the owner's turn and compute; as the owner does."""
        self._passes.wait(lambda: stopped() or self._stopped())
        return self._owner.run(work, num_tokens, stopped)

    def piece_tokens(self, most: int, speed: PieceSpeed | None = None) -> int:
        """Return how many tokens a piece may compute once no first pass is under way, at most `most`."""
        # Requests may have come meanwhile, which a large piece would hold up.
        self._passes.wait(self._stopped)
        return self._owner.piece_tokens(most, speed)


_passes = OfModel(lambda model: FirstPasses())


def first_passes_of(model: Any) -> FirstPasses:
    """Return the first passes of a transformers model; engines that share its weights share them."""
    return _passes(model)
