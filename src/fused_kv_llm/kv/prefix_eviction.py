"""Which nodes of the prefix tree make room: the store's policies, applied to nodes (RAGCache section 5.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from fused_kv_llm.store import Entry, resolve_policy

from .prefix_node import PrefixNode

__all__ = ["DEVICE", "HOST", "LeastRecentlyUsed", "PrefixEviction", "RankedEviction", "RecomputeSeconds"]

DEVICE, HOST = 0, 1
_LEVELS = 2
_WINDOW_USES = 10_000

RecomputeSeconds = Callable[[float, float], float]
"""``seconds(cached, new)``: what computing `new` tokens behind `cached` ones takes; RAGCache's T."""


class PrefixEviction(Protocol):
    """A rule that ranks nodes; the tree offers it leaves that nobody needs, and calls it under its lock."""

    def used(self, node: PrefixNode) -> None:
        """Learn that a request has found a node."""

    def computed(self, node: PrefixNode, cached: int, new: int) -> None:
        """Learn that a request has computed a node, with `new` tokens in all behind `cached` ones."""

    def kept(self, node: PrefixNode) -> None:
        """Learn that a request which had found a node has ended and leaves its KV."""

    def uses(self, node: PrefixNode) -> int:
        """Return how many requests have used a node."""

    def rank(self, node: PrefixNode, level: int) -> tuple[float, float]:
        """Return the value of a node on a level; the lowest makes room first."""

    def evicted(self, node: PrefixNode, level: int) -> None:
        """Learn that a node has made room on a level."""


@dataclass(frozen=True, slots=True)
class _Uses:
    """How a node was used: its uses, the clocks of the levels at the last, and what computing it took."""

    entry: Entry
    clocks: tuple[float, ...]
    seconds_per_token: float = 0.0
    times_computed: int = 0


class RankedEviction:
    """Ranks nodes by a policy of the store, which has the formulas.

    Under ``pgdsf`` it is RAGCache's algorithm 1. Size is a node's tokens. Its cost over its size is what a new token
    took in those requests that had to compute it, on average (equation 4): a prefix that stands behind much costs
    more. Each level has a clock of its own (equation 3), and a node keeps the clocks of its last use.

    The paper counts uses within a time window without saying which, and resets counts when the cache is cleared. Our
    choice: counts are those of a node's stay, and start again at its first use after `window` uses of the tree without
    one.

    Parameters
    ----------
    policy : str
        A name of ``POLICIES``.
    seconds : callable or None
        See :data:`RecomputeSeconds`; None takes every token to cost the same.
    window : int
        Uses of any nodes.

    Attributes
    ----------
    policy : str

    Raises
    ------
    ConfigError
        If there is no policy of that name.
    """

    def __init__(self, policy: str, seconds: RecomputeSeconds | None = None, window: int = _WINDOW_USES) -> None:
        self.policy = policy
        self._priority = resolve_policy(policy)
        self._seconds: RecomputeSeconds = seconds or (lambda _, new: new)
        self._window = window
        self._uses = 0
        self._clocks = [0.0] * _LEVELS

    @property
    def clocks(self) -> tuple[float, ...]:
        """The highest priority that was evicted, by level."""
        return tuple(self._clocks)

    def used(self, node: PrefixNode) -> None:
        """Count a use."""
        self._count(node)

    def computed(self, node: PrefixNode, cached: int, new: int) -> None:
        """Count a use, and average what a token took."""
        self._count(node)
        about = _about(node)
        times = about.times_computed
        average = (about.seconds_per_token * times + self._seconds(cached, new) / new) / (times + 1)
        node.about = replace(about, seconds_per_token=average, times_computed=times + 1)

    def kept(self, node: PrefixNode) -> None:
        """Note that it was needed until now, without counting the request twice."""
        self._uses += 1
        node.about = replace(_about(node), entry=replace(_about(node).entry, used=self._uses))

    def uses(self, node: PrefixNode) -> int:
        """Return its uses, as they are counted for the policy."""
        return _about(node).entry.hits

    def rank(self, node: PrefixNode, level: int) -> tuple[float, float]:
        """Return its priority, and when it was used last."""
        about, size = _about(node), node.num_tokens
        entry = replace(about.entry, size=size, cost=about.seconds_per_token * size)
        return self._priority(entry, about.clocks[level]), entry.used

    def evicted(self, node: PrefixNode, level: int) -> None:
        """Advance the level's clock."""
        self._clocks[level] = max(self._clocks[level], self.rank(node, level)[0])

    def _count(self, node: PrefixNode) -> None:
        self._uses += 1
        if node.about is None:
            node.about = _Uses(Entry(node.num_tokens, used=self._uses), self.clocks)
            return
        entry = _about(node).entry
        if self._uses - entry.used > self._window:
            entry = replace(entry, hits=0, reuse=0.0)
        node.about = replace(_about(node), entry=entry.touched(self._uses), clocks=self.clocks)


class LeastRecentlyUsed(RankedEviction):
    """The node makes room whose last use is longest ago."""

    def __init__(self) -> None:
        super().__init__("lru")


def _about(node: PrefixNode) -> _Uses:
    if not isinstance(node.about, _Uses):
        raise TypeError(f"a node of {node.num_tokens} tokens was ranked before it was used")
    return node.about
