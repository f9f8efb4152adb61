"""A bound on what takes a thread, or a process, for long: others must not wait for one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .refusals import RefusedError

__all__ = ["Slots"]

_RETRY_AFTER_S = 5


class Slots:
    """Lets so many go on at once, and refuses the others; thread-safe.

    Parameters
    ----------
    limit : int
    what : str
        What they are, in the plural, for the message.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._free, self._limit, self._what = threading.Semaphore(limit), limit, what

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take a slot.

        Raises
        ------
        RefusedError
            If none is free.
        """
        if not self._free.acquire(blocking=False):
            raise RefusedError(
                f"{self._limit} {self._what} are going on already; ask again later",
                429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=_RETRY_AFTER_S,
            )
        try:
            yield
        finally:
            self._free.release()
