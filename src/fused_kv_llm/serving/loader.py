"""The threads that load ahead what a :class:`.read_queue.ReadQueue` says."""

from __future__ import annotations

from fused_kv_llm.online import LoadAhead

from .helper_threads import HelperThreads
from .read_queue import MOST_READERS, ReadQueue

__all__ = ["Loader"]


class Loader:
    """Reads what requests need, in the order in which they were added; thread-safe."""

    def __init__(self) -> None:
        self._threads = HelperThreads(MOST_READERS, "fused-kv-load")
        self._queue = ReadQueue()

    def add(self, load: LoadAhead) -> None:
        """Have something loaded after what was added before."""
        self._queue.add(load)
        self.look()

    def look(self) -> None:
        """Put one more thread to work if there is something to read and too few do; to be called now and then."""
        if self._queue.wants_reader():
            self._threads.submit(self._work)

    def close(self) -> None:
        """Let the threads end; reads that do not come back are not waited for."""
        self._threads.close()

    def _work(self) -> None:
        try:
            while (taken := self._queue.take()) is not None:
                # What is left is enough for another thread, perhaps.
                self.look()
                load, job = taken
                try:
                    load.read(job)
                finally:
                    self._queue.came_back(job)
        except BaseException:
            self._queue.reader_died()
            raise
