"""The one thread that writes the request log; what cannot be written never holds up or fails a request."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

__all__ = ["HistoryWriter"]

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]

_MOST_WAITING = 1000
_MOST_WAITING_BYTES = 64 * 2**20
_log = logging.getLogger(__name__)


class _Task(NamedTuple):
    work: Work
    nbytes: int
    done: Future[Any] | None


class HistoryWriter:
    """Has a thread change a file, which is opened when it is first needed; thread-safe.

    A file that cannot be written is reported once, and what comes meanwhile is dropped, until :meth:`retry`. A piece of
    work that fails by itself is reported and dropped alone.

    Parameters
    ----------
    connect : callable
        Opens the file; it and what is done with it may raise ``sqlite3.Error`` and ``OSError``.
    name : str
        Of the file, for the log.
    """

    def __init__(self, connect: Callable[[], sqlite3.Connection], name: str) -> None:
        self._connect, self._name = connect, name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = self._failed = self._reported = self._overrun = False
        self._waiting = self._waiting_bytes = 0
        self._connection: sqlite3.Connection | None = None

    def put(self, work: Work, nbytes: int) -> None:
        """Have something written soon, which takes so much memory until then; dropped if too much waits already."""
        with self._lock:
            full = self._waiting >= _MOST_WAITING or self._waiting_bytes + nbytes > _MOST_WAITING_BYTES
            report, self._overrun = full and not self._overrun, full
            if not full and not self._closed:
                self._start(_Task(work, nbytes, None))
        if report:
            _log.warning("Requests are not kept in %s, since it is written too slowly", self._name)

    def call(self, work: Callable[[sqlite3.Connection], T], timeout_s: float) -> T:
        """Have something done behind all that waits, and return what it returned.

        Raises
        ------
        sqlite3.Error, OSError
            If the file cannot be used.
        TimeoutError
            If it takes too long; it may still be done.
        """
        done: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise sqlite3.ProgrammingError(f"{self._name} was closed")
            self._start(_Task(work, 0, done))
        return done.result(timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was put is written, or dropped."""
        with self._lock:
            if self._thread is None or self._closed or not self._waiting:
                return
            done: Future[None] = Future()
            self._start(_Task(lambda _: None, 0, done))
        # What cannot be written is no error of who reads.
        done.exception(timeout_s)

    def retry(self) -> None:
        """Try again with what is put next, if the file could not be written."""
        self._failed = False

    def fail(self, error: Exception) -> None:
        """Give up writing until it is tried again; that is reported once, until it has worked again."""
        self._failed = True
        if not self._reported and not self._closed:
            self._reported = True
            _log.error(
                "Requests cannot be kept in %s: %s. Answers go on. Free space, or move a damaged file away.",
                self._name,
                error,
            )

    def close(self) -> None:
        """Write what waits, and close the file."""
        with self._lock:
            self._closed, thread = True, self._thread
        if thread is not None:
            self._tasks.put(None)
            thread.join()

    def _start(self, task: _Task) -> None:
        self._waiting += 1
        self._waiting_bytes += task.nbytes
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fused-kv-requests", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    # -- in the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._do(task)
        self._disconnect()

    def _do(self, task: _Task) -> None:
        try:
            if task.done is None and self._failed:
                return
            result = self._try(task.work)
            if task.done is not None:
                task.done.set_result(result)
            elif self._reported:
                self._reported = False
                _log.info("Requests are kept in %s again", self._name)
        except Exception as error:  # whatever it is, requests are answered
            if task.done is not None:
                task.done.set_exception(error)
            elif self._connection is None:
                self.fail(error)
            else:
                # The file is well: what was to be written cannot be, such as a request that is nested too deep.
                self._connection.rollback()
                _log.warning("A request is not kept in %s: %s", self._name, error)
        finally:
            with self._lock:
                self._waiting -= 1
                self._waiting_bytes -= task.nbytes

    def _try(self, work: Work) -> Any:
        try:
            if self._connection is None:
                self._connection = self._connect()
            return work(self._connection)
        except (sqlite3.Error, OSError):
            # A new connection sees a file that was mended or replaced.
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
