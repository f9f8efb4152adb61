"""Queues of several tenants that are served in turn: one with much to do does not hold up another."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

__all__ = ["Turns"]

T = TypeVar("T")


class Turns(Generic[T]):
    """What waits, by tenant; thread-safe.

    Parameters
    ----------
    limit : int
        Most that may wait for one tenant.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._changed, self._closed = limit, threading.Condition(), False
        # The tenant whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def is_full(self, tenant: str) -> bool:
        """Whether nothing more may wait for a tenant."""
        with self._changed:
            return len(self._waiting.get(tenant, ())) >= self._limit

    def put(self, tenant: str, task: T) -> bool:
        """Have a task wait behind the tenant's others; False if too many do."""
        with self._changed:
            queue = self._waiting.setdefault(tenant, deque())
            if len(queue) >= self._limit:
                return False
            queue.append(task)
            self._changed.notify()
            return True

    def take(self) -> T | None:
        """Wait for a task, the first of the tenant whose turn it is; None after :meth:`close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            tenant, queue = next(iter(self._waiting.items()))
            task = queue.popleft()
            if queue:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            return task

    def close(self) -> None:
        """Let whoever waits for a task go; what waits is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
