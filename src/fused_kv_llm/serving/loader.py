"""The threads that load ahead: requests in their order, and around those whose disk does not answer.

Few reads are under way at once, so that the first request has the disk's bandwidth, and not a share of it. A read that
does not come back does not count any more after a while: another thread goes on with the next request.
"""

from __future__ import annotations

import threading
import time

from fused_kv_llm.online import STUCK_S, LayerRead, LoadAhead
from fused_kv_llm.thread_pool import ThreadPool

__all__ = ["Loader"]

_READS_AT_ONCE = 4
_MOST_THREADS = 32


class Loader:
    """Reads what requests need, in the order in which they were added; thread-safe."""

    def __init__(self) -> None:
        self._pool = ThreadPool(_MOST_THREADS, "fused-kv-load")
        self._lock = threading.Lock()
        self._loads: list[LoadAhead] = []
        # Of the reads under way: whose they are, and when they began.
        self._under_way: dict[LayerRead, tuple[LoadAhead, float]] = {}
        self._threads = 0

    def add(self, load: LoadAhead) -> None:
        """Have something loaded after what was added before."""
        with self._lock:
            self._loads.append(load)
        self.look()

    def look(self) -> None:
        """Put one more thread to work if there is something to read and too few do; to be called now and then."""
        with self._lock:
            if not self._loads or self._threads >= min(_MOST_THREADS, _READS_AT_ONCE + self._num_stuck()):
                return
            self._threads += 1
        self._pool.executor().submit(self._work)

    def close(self) -> None:
        """Let the threads end; reads that do not come back are not waited for."""
        self._pool.close(wait=False)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            # What is left is enough for another thread, perhaps.
            self.look()
            load, job = taken
            try:
                load.read(job)
            finally:
                with self._lock:
                    del self._under_way[job]

    def _take(self) -> tuple[LoadAhead, LayerRead] | None:
        """Take the next read; None if there is none for this thread, which ends then."""
        now_s = time.monotonic()
        with self._lock:
            self._loads = [load for load in self._loads if not load.is_over]
            if len(self._under_way) - self._num_stuck() < _READS_AT_ONCE:
                stuck = {id(load) for load, begun_s in self._under_way.values() if now_s - begun_s > STUCK_S}
                for load in self._loads:
                    job = None if id(load) in stuck else load.take()
                    if job is not None:
                        self._under_way[job] = load, now_s
                        return load, job
            self._threads -= 1
            return None

    def _num_stuck(self) -> int:
        now_s = time.monotonic()
        return sum(now_s - begun_s > STUCK_S for _, begun_s in self._under_way.values())
