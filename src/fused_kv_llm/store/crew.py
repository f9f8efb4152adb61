"""A thread that helps whoever has many short things to do: reading and hashing release the interpreter's lock.

Whoever asks for help goes on alone meanwhile, takes one task after another, and waits at the end only for a task that
the helper is in the middle of. Without a free core the helper comes late, finds nothing to do, and has cost nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from fused_kv_llm.store.threads import available_cores

__all__ = ["Crew", "crew"]

_Item = TypeVar("_Item")


class _Job:
    """Something to do with every item, by several threads; `run` returns when all are done or one has failed."""

    def __init__(self, do: Callable[[Any], object], items: Iterable[Any]) -> None:
        self._do = do
        # The next one is taken in one step of the interpreter.
        self._items = iter(tuple(items))
        self._lock = threading.Lock()
        self._helping = 0
        # Held while somebody helps.
        self._busy = threading.Lock()
        self._closed = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Take items until there are none, wait for those that others have taken, and raise what has gone wrong."""
        try:
            self._work()
        except BaseException as error:
            # A signal's handler, between two steps.
            self._error = error
        self.leave()
        found, self._error = self._error, None
        if found is not None:
            try:
                raise found
            finally:
                # It holds this frame, and what was read to: neither is to wait for the collector.
                del found

    def leave(self) -> None:
        """Let nobody begin any more, and wait for those who are in the middle of something."""
        while True:
            try:
                self._wait()
                return
            except BaseException as error:
                # A signal's handler: memory that others are writing to cannot be left behind.
                self._error = error

    def _wait(self) -> None:
        with self._lock:
            self._closed = True
        with self._busy:
            pass

    def help(self) -> None:
        """Take items for somebody else, unless there are none left."""
        with self._lock:
            if self._closed:
                return
            if not self._helping:
                self._busy.acquire()
            self._helping += 1
        self._work()
        with self._lock:
            self._helping -= 1
            if not self._helping:
                self._busy.release()

    def _work(self) -> None:
        try:
            for item in self._items:
                self._do(item)
                if self._error is not None:
                    return
        except BaseException as error:
            # Whoever waits for the job gets it; the first one, if there are several.
            self._error = self._error or error


class Crew:
    """Threads that are started when they are first needed, at most `size`; fork-safe and thread-safe.

    Parameters
    ----------
    size : int
        Most threads that help; 0 lets everyone work alone.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._start_anew()
        os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._running = 0

    def run(self, do: Callable[[_Item], object], items: Iterable[_Item]) -> None:
        """Call `do` with every item once, in this thread and in those that help; return when all calls have returned.

        If one raises, items that nobody has taken are left out, and the error is raised here.
        """
        job = _Job(do, items)
        with self._lock:
            self._running += 1
            # As many as cores have their own thread each, and would only be in each other's way.
            helped = self._running <= self._size and self._has_thread()
        try:
            if helped:
                self._jobs.put(job)
            job.run()
        finally:
            # Done already, unless a signal's handler was faster than the first step.
            job.leave()
            with self._lock:
                self._running -= 1

    def _has_thread(self) -> bool:
        if self._threads < self._size:
            thread = threading.Thread(target=self._serve, args=(self._jobs,), name="fused-kv-crew", daemon=True)
            # A system without room for another thread leaves everyone to themselves.
            with suppress(RuntimeError):
                thread.start()
                self._threads += 1
        return self._threads > 0

    @staticmethod
    def _serve(jobs: SimpleQueue[_Job]) -> None:
        while True:
            jobs.get().help()


# One: memory has no bandwidth left for more.
crew = Crew(min(1, available_cores() - 1))
