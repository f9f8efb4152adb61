"""Writing to the store in a background thread while the next batch computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from fused_kv_llm.thread_pool import release_openmp_workers

__all__ = ["BackgroundWriter"]

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Writes what was computed, one after another; an error stops it and is raised in the thread that submits.

    Parameters
    ----------
    write : callable
        Writes one item; called in the writer's thread.
    max_pending : int
        Items that may wait; more make `submit` block, so that memory stays bounded.
    """

    def __init__(self, write: Callable[[T], None], max_pending: int = 32) -> None:
        self._write = write
        self._queue: queue.Queue[tuple[T] | None] = queue.Queue(max_pending)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fused-kv-writer", daemon=True)
        self._thread.start()

    def submit(self, item: T) -> None:
        """Queue an item.

        Raises
        ------
        StoreError
            What an earlier write met.
        """
        self._raise_error()
        self._queue.put((item,))

    def close(self) -> None:
        """Write what is queued and stop; raises what a write met."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            if self._error is not None:
                continue
            try:
                self._write(queued[0])
            except Exception as error:
                self._error = error
            # They would make those of the thread that owns the model sleep whenever they wait.
            release_openmp_workers()
