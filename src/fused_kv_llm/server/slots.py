"""A bound on what takes a thread, or a process, for long: others must not wait for one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .refusals import RefusedError

__all__ = ["Slots"]

_RETRY_AFTER_S = 5


class Slots:
    """Lets so many go on at once, and refuses the others; thread-safe.

    Parameters
    ----------
    limit, each : int
        How many, and how many of one tenant.
    what : str
        What they are, in the plural, for the message.
    """

    def __init__(self, limit: int, each: int, what: str) -> None:
        self._limit, self._each, self._what = limit, each, what
        self._lock, self._taken = threading.Lock(), Counter[str]()

    @contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Take a slot for a tenant.

        Raises
        ------
        RefusedError
            If none is free.
        """
        with self._lock:
            own = self._taken[tenant]
            is_free = own < self._each and self._taken.total() < self._limit
            if is_free:
                self._taken[tenant] += 1
        if not is_free:
            whose = f"{own} of your" if own == self._each < self._limit else f"{self._limit}"
            raise RefusedError(
                f"{whose} {self._what} are going on already; ask again later",
                429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=_RETRY_AFTER_S,
            )
        try:
            yield
        finally:
            with self._lock:
                self._taken[tenant] -= 1
                if not self._taken[tenant]:
                    del self._taken[tenant]
