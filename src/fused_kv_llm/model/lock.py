"""Who may run a forward now: requests before background work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from fused_kv_llm.thread_pool import release_openmp_workers

__all__ = ["ModelLock", "StoppedError", "lock_of"]

_QUIET_S = 0.1
_POLL_S = 0.02


class StoppedError(Exception):
    """Background work was told to stop, or what it had planned has changed; it may be begun again."""


class ModelLock:
    """A lock around one model's forwards; requests take it with ``with lock:``.

    Background work takes it with :meth:`background`, for one small batch at a time: only while no request waits, and
    only after a short time without one. A request that is being answered takes the lock for every token, so background
    work does not come between two tokens.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Let nobody hold it or wait for it: who did is not there in a forked process."""
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._waiting = 0
        self._released_s = 0.0

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
        self._released_s = time.monotonic()
        self._lock.release()

    def locked(self) -> bool:
        """Return whether someone holds the lock."""
        return self._lock.locked()

    @contextmanager
    def background(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock for one small batch of background work.

        Parameters
        ----------
        stopped : callable
            Says whether to give up waiting.

        Raises
        ------
        StoppedError
            If it does.
        """
        while True:
            if stopped():
                raise StoppedError
            if self._take_if_quiet():
                break
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            # They would make those of the thread that answers requests sleep whenever they wait.
            release_openmp_workers()
            self._lock.release()

    def wait(self, stopped: Callable[[], bool]) -> None:
        """Return once :meth:`background` could be entered: for background work that leaves the model alone."""
        with self.background(stopped):
            return

    def _take_if_quiet(self) -> bool:
        quiet = self._waiting == 0 and time.monotonic() - self._released_s >= _QUIET_S
        if not quiet or not self._lock.acquire(blocking=False):
            return False
        if self._waiting:
            self._lock.release()
            return False
        return True


_locks: WeakKeyDictionary[Any, ModelLock] = WeakKeyDictionary()
_finding = threading.Lock()


def lock_of(model: Any) -> ModelLock:
    """Return the lock of a transformers model; engines that share its weights share it.

    Otherwise one engine's background work would run beside another's requests.
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
