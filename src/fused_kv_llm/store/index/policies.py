"""Which entry to evict first when a tier is full: replacement policies as functions.

A policy maps an entry to a priority. The lowest priority is evicted first; among equal ones, the least recently used.
Nothing here knows about files or tensors.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fused_kv_llm.errors import ConfigError

__all__ = ["POLICIES", "Entry", "EvictionQueue", "Policy", "RecomputeCost", "resolve_policy"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a policy may know about a chunk or sidecar.

    Parameters
    ----------
    size : float
        Its share of the budget: bytes, or tokens.
    cost : float
        Seconds to compute it again, or a number proportional to them.
    hits : int
        How often it was used, its insertion included.
    reuse : float
        Sum of the weights of its uses; a weight is 1 unless the caller knows better.
    used : float
        When it was used last: a time, or any number that grows.
    """

    size: float
    cost: float = 1.0
    hits: int = 1
    reuse: float = 1.0
    used: float = 0.0

    def touched(self, used: float, weight: float = 1.0, times: int = 1) -> Entry:
        """Return the entry after further uses."""
        return replace(self, hits=self.hits + times, reuse=self.reuse + weight, used=max(self.used, used))


Policy = Callable[[Entry, float], float]
"""``priority(entry, clock)``; the clock is the highest priority that was ever evicted."""


def _lru(entry: Entry, clock: float) -> float:
    return entry.used


def _lfu(entry: Entry, clock: float) -> float:
    return float(entry.hits)


def _gdsf(entry: Entry, clock: float) -> float:
    """Greedy-Dual-Size-Frequency (Cherkasova 1998) at cost 1, which aims at the hit rate."""
    return clock + entry.hits / entry.size


def _pgdsf(entry: Entry, clock: float) -> float:
    """RAGCache section 5.1, equation 2: the cost is what recomputing takes after the cached prefix.

    In the store the cost is a chunk's tokens unless ``put`` is given another; an engine gives what measured prefill
    times say. In the prefix tree cost over size is the average of equation 4.
    """
    return clock + entry.hits * entry.cost / entry.size


def _reuse_frequency(entry: Entry, clock: float) -> float:
    """Cache-Craft section 3.3: every use adds 1/CFO, so chunks that need little recomputation stay longer.

    An engine tells the store the CFO of each use, see ``KVStore.weigh_use``; uses without one count as 1.
    """
    return entry.reuse


POLICIES: dict[str, Policy] = {
    "lru": _lru,
    "lfu": _lfu,
    "gdsf": _gdsf,
    "pgdsf": _pgdsf,
    "reuse": _reuse_frequency,
}


def resolve_policy(name: str, option: str = "policy") -> Policy:
    """Return a policy by its name, which an option gives.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    if name not in POLICIES:
        raise ConfigError(f"{option}={name!r} is unknown: use {', '.join(POLICIES)}")
    return POLICIES[name]


class EvictionQueue:
    """Entries in the order in which a policy gives them up; not thread-safe.

    Parameters
    ----------
    policy : callable
        A value of ``POLICIES``.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries: dict[str, Entry] = {}
        self._places: dict[str, tuple[float, float]] = {}
        self._heap: list[tuple[float, float, str]] = []
        self.clock = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def put(self, key: str, entry: Entry) -> None:
        """Add an entry, or replace it."""
        place = self._policy(entry, self.clock), entry.used
        self._entries[key], self._places[key] = entry, place
        heapq.heappush(self._heap, (*place, key))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [(*where, name) for name, where in self._places.items()]
            heapq.heapify(self._heap)

    def touch(self, key: str, used: float, weight: float = 1.0) -> None:
        """Count a use of an entry."""
        self.put(key, self._entries[key].touched(used, weight))

    def remove(self, key: str) -> None:
        """Forget an entry, which need not be there."""
        self._entries.pop(key, None)
        self._places.pop(key, None)

    def pop(self) -> str | None:
        """Remove and return the entry of the lowest priority; None if there is none."""
        while self._heap:
            priority, used, key = heapq.heappop(self._heap)
            if self._places.get(key) == (priority, used):
                self.clock = max(self.clock, priority)
                self.remove(key)
                return key
        return None


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """Measured prefill times, interpolated (RAGCache section 5.1, algorithm 1).

    Parameters
    ----------
    cached_tokens : sequence of int
        Ascending numbers of tokens before the new ones.
    new_tokens : sequence of int
        Ascending numbers of tokens to compute.
    seconds : sequence of sequences of float
        ``seconds[i][j]`` is the time of ``new_tokens[j]`` after ``cached_tokens[i]``.

    Raises
    ------
    ConfigError
        If the grid is smaller than 2 x 2, not ascending, or has gaps.
    """

    cached_tokens: Sequence[int]
    new_tokens: Sequence[int]
    seconds: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        axes = (self.cached_tokens, self.new_tokens)
        ascending = all(len(a) >= 2 and all(x < y for x, y in pairwise(a)) for a in axes)
        whole = len(self.seconds) == len(axes[0]) and all(len(row) == len(axes[1]) for row in self.seconds)
        if not (ascending and whole):
            raise ConfigError("A cost table needs two ascending axes of two points or more, and a time for each pair.")

    def __call__(self, cached: float, new: float) -> float:
        """Return the seconds that `new` tokens take after `cached` ones, by bilinear interpolation.

        Outside the measured grid the nearest cell is continued, at least 0.
        """
        i, u = _cell(self.cached_tokens, cached)
        j, w = _cell(self.new_tokens, new)
        low = self.seconds[i][j] * (1 - w) + self.seconds[i][j + 1] * w
        high = self.seconds[i + 1][j] * (1 - w) + self.seconds[i + 1][j + 1] * w
        return max(0.0, low * (1 - u) + high * u)


def _cell(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Return the cell of an axis that a value is in, and how far along it."""
    index = min(max(bisect.bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])
