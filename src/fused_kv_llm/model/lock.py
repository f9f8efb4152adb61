"""Who may run a forward now."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["ModelLock", "lock_of"]


class ModelLock:
    """A lock around one model's forwards; taken with ``with lock:``, for every step and every piece of ingestion."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Let nobody hold it or wait for it: who did is not there in a forked process."""
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0

    def __enter__(self) -> None:
        with self._counting:
            self._waiting += 1
        try:
            self._lock.acquire()
        finally:
            with self._counting:
                self._waiting -= 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def locked(self) -> bool:
        """Return whether someone holds the lock."""
        return self._lock.locked()

    @property
    def is_wanted(self) -> bool:
        """Whether a thread waits for the lock: what can wait should not take it first."""
        return self._waiting > 0


_locks: WeakKeyDictionary[Any, ModelLock] = WeakKeyDictionary()
_finding = threading.Lock()


def lock_of(model: Any) -> ModelLock:
    """Return the lock of a transformers model; engines that share its weights share it.

    Otherwise one engine's forwards would run beside another's.
    """
    with _finding:
        return _locks.setdefault(model, ModelLock())


def _after_fork() -> None:
    global _finding  # noqa: PLW0603 - a lock that was held cannot be let go here
    _finding = threading.Lock()
    for lock in list(_locks.values()):
        lock.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
