"""How chunks are used: counters of this process, and what the index should learn of it now and then."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from fused_kv_llm.store.ledger import Uses

__all__ = ["StoreCounters", "UseLog"]

_MOST_PENDING = 512
_LONGEST_PENDING_S = 10.0


@dataclass(slots=True)
class StoreCounters:
    """What this process has done with a store since it opened it.

    Parameters
    ----------
    hits : dict of str to int
        Chunks opened, by the tier they came from: memory, disk, remote.
    misses : int
        Chunks asked for that were not there or not usable.
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

    @property
    def hit_rate(self) -> float:
        """Share of the chunks asked for that were there; 0 if none was asked for."""
        found = sum(self.hits.values())
        return found / (found + self.misses) if found + self.misses else 0.0


class UseLog:
    """Counts what happens, and collects the uses of chunks until the index takes them; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = StoreCounters()
        self._pending: dict[str, Uses] = {}
        self._since_s = time.monotonic()

    def hit(self, key: str, tier: str) -> bool:
        """Count the use of a chunk; whether it is time for the index to learn of the uses."""
        now_s = time.time()
        with self._lock:
            self._counters.hits[tier] += 1
            times, weight, _ = self._pending.get(key, (0, 0.0, 0.0))
            if not self._pending:
                self._since_s = time.monotonic()
            self._pending[key] = Uses(times + 1, weight + 1.0, now_s)
            waiting_s = time.monotonic() - self._since_s
            return len(self._pending) >= _MOST_PENDING or waiting_s > _LONGEST_PENDING_S

    def add(self, **more: int) -> None:
        """Add to counters by their names."""
        with self._lock:
            for name, number in more.items():
                setattr(self._counters, name, getattr(self._counters, name) + number)

    def take(self) -> dict[str, Uses]:
        """Return the uses that the index has not seen, and forget them."""
        with self._lock:
            pending, self._pending = self._pending, {}
            self._since_s = time.monotonic()
            return pending

    def counters(self) -> StoreCounters:
        """Return the counters as they are now."""
        with self._lock:
            return replace(self._counters, hits=dict(self._counters.hits))
