"""Threads of our own: how many cores there are for them, and pools that a forked process starts anew."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["ThreadPool", "available_cores"]


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadPool:
    """An executor whose threads are there in every process that asks; thread-safe.

    A forked process has none of its parent's threads, and would wait for them for ever.

    Parameters
    ----------
    size : int
        Most threads.
    name : str
        What their names begin with.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def executor(self) -> ThreadPoolExecutor:
        """Return this process's executor, which is made when it is first needed."""
        with self._lock:
            if self._executor is None or self._pid != os.getpid():
                self._executor = ThreadPoolExecutor(self._size, thread_name_prefix=self._name)
                self._pid = os.getpid()
            return self._executor

    def close(self) -> None:
        """Drop what has not begun, and wait for what has; closing twice is harmless."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None and self._pid == os.getpid():
            executor.shutdown(wait=True, cancel_futures=True)
