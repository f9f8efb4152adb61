"""Loadings that were given up because they hung; if there are many, the disk is taken for dead."""

from __future__ import annotations

import threading
from collections.abc import Hashable

__all__ = ["HungReads"]

# Of so many requests. Every one of them keeps threads until it comes back, if ever.
_DEAD = 4


class HungReads:
    """Requests of an engine whose loading was given up and has not come back; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hung: set[Hashable] = set()

    def add(self, one: Hashable) -> None:
        """Note that a loading was given up."""
        with self._lock:
            self._hung.add(one)

    def discard(self, one: Hashable) -> bool:
        """Note that a loading has come back; return whether it had been given up."""
        with self._lock:
            was_hung = one in self._hung
            self._hung.discard(one)
            return was_hung

    @property
    def is_dead(self) -> bool:
        """Whether so many have not come back that nothing more is read from the disk until they do."""
        return len(self._hung) >= _DEAD
