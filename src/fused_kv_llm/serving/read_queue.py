"""What is read next for requests: in their order, and around those whose disk does not answer.

Few reads are under way at once, so that the first request has the disk's bandwidth, and not a share of it. A read that
does not come back does not count any more after a while: another reader goes on with the next request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fused_kv_llm.online import STUCK_S, LayerRead, LoadAhead

__all__ = ["MOST_READERS", "ReadQueue"]

MOST_READERS = 32
"""Readers at most, those whose read does not come back among them."""

_READS_AT_ONCE = 4


class ReadQueue:
    """Says who reads what; thread-safe.

    Parameters
    ----------
    clock : callable
        Seconds of any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loads: list[LoadAhead] = []
        # Of the reads under way: whose they are, and when they began.
        self._under_way: dict[LayerRead, tuple[LoadAhead, float]] = {}
        self._readers = 0

    def add(self, load: LoadAhead) -> None:
        """Have something loaded after what was added before."""
        with self._lock:
            self._loads.append(load)

    def wants_reader(self) -> bool:
        """Count one more reader if there is something to read and too few do; it is to :meth:`take` then."""
        with self._lock:
            if not self._loads or self._readers >= min(MOST_READERS, _READS_AT_ONCE + self._num_stuck()):
                return False
            self._readers += 1
            return True

    def take(self) -> tuple[LoadAhead, LayerRead] | None:
        """Return the next read; None if there is none for this reader, which is no reader any more then."""
        now_s = self._clock()
        with self._lock:
            self._loads = [load for load in self._loads if not load.is_over]
            if len(self._under_way) - self._num_stuck() < _READS_AT_ONCE:
                stuck = {id(load) for load, begun_s in self._under_way.values() if now_s - begun_s > STUCK_S}
                for load in self._loads:
                    job = None if id(load) in stuck else load.take()
                    if job is not None:
                        self._under_way[job] = load, now_s
                        return load, job
            self._readers -= 1
            return None

    def reader_died(self) -> None:
        """Note that a reader has ended without being told to; another one takes its place."""
        with self._lock:
            self._readers -= 1

    def came_back(self, job: LayerRead) -> None:
        """Note that a read is over."""
        with self._lock:
            del self._under_way[job]

    def _num_stuck(self) -> int:
        now_s = self._clock()
        return sum(now_s - begun_s > STUCK_S for _, begun_s in self._under_way.values())
