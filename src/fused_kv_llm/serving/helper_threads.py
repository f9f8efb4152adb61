"""Threads for what may never come back, such as a read of a disk that does not answer: nobody waits for them."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["HelperThreads"]

_log = logging.getLogger(__name__)

# Those that have nothing to do end almost at once.
_JOIN_S = 1.0


class HelperThreads:
    """Daemon threads that call what they are given, in its order; thread-safe.

    Unlike those of a ``ThreadPoolExecutor`` they do not keep a process from ending. A job that fails, however it does,
    does not keep the next one from being done.

    Parameters
    ----------
    size : int
        Most threads, besides those that were given up.
    name : str
        What their names begin with.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._crew, self._pid = _Crew(), os.getpid()

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Have something called by a thread."""
        if self._pid != os.getpid():
            # A forked process has none of its parent's threads.
            self._crew, self._pid = _Crew(), os.getpid()
        if self._crew.add(partial(work, *args), self._size):
            threading.Thread(target=self._crew.work, name=self._name, daemon=True).start()

    def give_up_one(self) -> None:
        """Let there be one thread more, in place of one that has not come back."""
        with self._crew.changed:
            self._crew.given_up += 1

    def came_back(self) -> None:
        """Let there be one thread fewer again."""
        with self._crew.changed:
            self._crew.given_up = max(0, self._crew.given_up - 1)

    def close(self) -> None:
        """Let the threads end; what they are at is not waited for, and what has not begun is dropped."""
        crew, self._crew = self._crew, _Crew()
        crew.end()


class _Crew:
    """The threads between two rests, and what they have to do."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.given_up = 0
        self._jobs: deque[Callable[[], object]] = deque()
        self._threads = self._idle = 0
        self._ended = False
        self._resting: set[threading.Thread] = set()

    def add(self, job: Callable[[], object], size: int) -> bool:
        """Take a job; return whether a thread is to be started for it."""
        with self.changed:
            self._jobs.append(job)
            self.changed.notify()
            is_wanted = len(self._jobs) > self._idle and self._threads < size + self.given_up
            self._threads += is_wanted
            return is_wanted

    def work(self) -> None:
        """Do what there is to do until the end; called by each thread."""
        while self._work_once():
            continue
        with self.changed:
            self._threads -= 1

    def _work_once(self) -> bool:
        """Wait for a job and do it; False at the end.

        A function, so that a thread that waits for the next one keeps nothing of the last one alive, such as an engine
        that was closed.
        """
        job = self._next()
        if job is None:
            return False
        try:
            job()
        except BaseException as error:
            # Even one that is told to end: jobs may wait behind it for which nobody would start another thread.
            _log.warning("A job of a helper thread has failed: %r", error)
        return True

    def end(self) -> None:
        """Drop what has not begun, and wait for the threads that have nothing to do."""
        with self.changed:
            self._ended = True
            self._jobs.clear()
            self.changed.notify_all()
            resting = list(self._resting)
        for thread in resting:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _next(self) -> Callable[[], object] | None:
        own = threading.current_thread()
        with self.changed:
            self._idle += 1
            self._resting.add(own)
            try:
                self.changed.wait_for(lambda: self._jobs or self._ended)
                return self._jobs.popleft() if self._jobs else None
            finally:
                self._idle -= 1
                self._resting.discard(own)
