"""What a process has once for each model, whichever engines share it; a forked process begins it anew."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

__all__ = ["OfModel"]


class _BegunAnew(Protocol):
    def begin_anew(self) -> None: ...


T = TypeVar("T", bound=_BegunAnew)


class OfModel(Generic[T]):
    """Makes something for a model when it is first asked for, and keeps it as long as the model.

    Parameters
    ----------
    make : callable
        Makes it, given the model; what it makes may not refer to the model. A forked process, which has none of its
        parent's threads, calls its ``begin_anew``.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[Any, T] = WeakKeyDictionary()
        self._finding = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def __call__(self, model: Any) -> T:
        """Return what a transformers model has."""
        with self._finding:
            if model not in self._made:
                self._made[model] = self._make(model)
            return self._made[model]

    def all(self) -> list[T]:
        """Return what all models have."""
        return list(self._made.values())

    def _after_fork(self) -> None:
        # A lock that was held cannot be let go here.
        self._finding = threading.Lock()
        for one in self.all():
            one.begin_anew()
