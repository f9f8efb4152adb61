"""How chunks are used: counters of this process, and uses that wait to be written to the index."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from fused_kv_llm.store.index import Uses

__all__ = ["StoreCounters", "UseLog"]

_HITS = "hits_"
_MOST_PENDING = 512
_LONGEST_PENDING_S = 10.0


@dataclass(slots=True)
class StoreCounters:
    """What a process has done with a store since it opened it.

    Parameters
    ----------
    hits : dict of str to int
        Chunks opened, by the tier they came from: memory, disk, remote.
    misses : int
        Requested chunks that were not stored or not usable.
    puts, bytes_written : int
        Chunks written, and the bytes of their files.
    evicted_memory, evicted_disk : int
        Chunks that made room in the memory tier and on the disk.
    demoted, promoted : int
        Chunks copied to the remote tier and from it.
    damaged : int
        Chunks taken out because of damage.
    """

    hits: dict[str, int] = field(default_factory=lambda: {"memory": 0, "disk": 0, "remote": 0})
    misses: int = 0
    puts: int = 0
    bytes_written: int = 0
    evicted_memory: int = 0
    evicted_disk: int = 0
    demoted: int = 0
    promoted: int = 0
    damaged: int = 0

    @classmethod
    def from_counts(cls, counts: Mapping[str, float]) -> StoreCounters:
        """Return counters from sums of what ``counts`` gave; unknown names are left out."""
        counters = cls()
        for name in counters.counts():
            number = int(counts.get(name, 0))
            tier = name.removeprefix(_HITS)
            if tier == name:
                setattr(counters, name, number)
            else:
                counters.hits[tier] = number
        return counters

    def counts(self) -> dict[str, int]:
        """Return the counters by flat names, hits as ``hits_<tier>``."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "hits"}
        return {**{_HITS + tier: number for tier, number in self.hits.items()}, **plain}

    @property
    def hit_rate(self) -> float:
        """Share of the requested chunks that were there; 0 if none was requested."""
        found = sum(self.hits.values())
        return found / (found + self.misses) if found + self.misses else 0.0


class UseLog:
    """Counts events, and collects the uses of chunks until the index takes them; thread-safe.

    Parameters
    ----------
    calendar, clock : callable
        Seconds since the epoch, of uses; and seconds of any beginning, of how long they wait.
    """

    def __init__(self, calendar: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self._calendar, self._clock = calendar, clock
        self._lock = threading.Lock()
        self._counters = StoreCounters()
        self._reported = self._counters.counts()
        self._pending: dict[str, Uses] = {}
        self._since_s = self._clock()

    def hit(self, key: str, tier: str) -> bool:
        """Count the use of a chunk; True if it is time to write the uses to the index."""
        now_s = self._calendar()
        with self._lock:
            self._counters.hits[tier] += 1
            times, weight, _ = self._pending.get(key, (0, 0.0, 0.0))
            if not self._pending:
                self._since_s = self._clock()
            self._pending[key] = Uses(times + 1, weight + 1.0, now_s)
            waiting_s = self._clock() - self._since_s
            return len(self._pending) >= _MOST_PENDING or waiting_s > _LONGEST_PENDING_S

    def weigh(self, key: str, more: float) -> None:
        """Add to the weight of a use that is counted already."""
        with self._lock:
            times, weight, used_s = self._pending.get(key, (0, 0.0, 0.0))
            self._pending[key] = Uses(times, weight + more, used_s)

    def add(self, **more: int) -> None:
        """Add to counters by their names."""
        with self._lock:
            for name, number in more.items():
                setattr(self._counters, name, getattr(self._counters, name) + number)

    def take(self) -> tuple[dict[str, Uses], dict[str, int]]:
        """Return the uses that are not in the index yet, and by how much each counter has grown; forget both."""
        with self._lock:
            pending, self._pending = self._pending, {}
            self._since_s = self._clock()
            now, before = self._counters.counts(), self._reported
            self._reported = now
            return pending, {name: now[name] - before[name] for name in now if now[name] != before[name]}

    def counters(self) -> StoreCounters:
        """Return a copy of the counters."""
        with self._lock:
            return replace(self._counters, hits=dict(self._counters.hits))
