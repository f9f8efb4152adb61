"""Threads: how many cores there are, pools that a forked process starts anew, and OpenMP's workers."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["ThreadPool", "available_cores", "loaded_openmp", "release_openmp_workers"]


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_openmp_workers() -> None:
    """End the OpenMP workers of the calling thread; its next parallel computation starts new ones.

    Every thread that computes gets workers of its own, which wait for the next time. GNU's OpenMP counts them, and once
    they are more than the cores, all workers of the process go to sleep almost at once when they wait: decoding in one
    thread is slower after another thread has computed. Does nothing with another OpenMP.
    """
    library = loaded_openmp()
    if library is not None:
        library.omp_pause_resource_all(_PAUSE_SOFT)


_PAUSE_SOFT = 1


@functools.lru_cache(maxsize=1)
def loaded_openmp() -> ctypes.CDLL | None:
    """Return GNU's OpenMP if that is what torch has loaded; None otherwise."""
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (AttributeError, OSError):
        return None
    return library if hasattr(library, "omp_pause_resource_all") and hasattr(library, "GOMP_parallel") else None


def _before_fork() -> None:
    # A forked process has none of its parent's workers, and would wait for them when it computes or ends its own.
    if "torch" in sys.modules:
        release_openmp_workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


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

    def close(self, *, wait: bool = True) -> None:
        """Drop what has not begun, and wait for what has unless told not to; closing twice is harmless."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None and self._pid == os.getpid():
            executor.shutdown(wait=wait, cancel_futures=True)
