"""Who may run a forward now."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from .of_model import OfModel

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


_locks = OfModel(lambda model: ModelLock())


def lock_of(model: Any) -> ModelLock:
    """Return the lock of a transformers model; engines that share its weights share it.

    Otherwise one engine's forwards would run beside another's.
    """
    return _locks(model)
