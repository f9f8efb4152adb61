"""Which nodes of the prefix tree make room."""

from __future__ import annotations

from typing import Protocol

from .prefix_node import PrefixNode

__all__ = ["LeastRecentlyUsed", "PrefixEviction"]


class PrefixEviction(Protocol):
    """A rule that ranks nodes; the tree offers it leaves that nobody needs, and calls it under its lock."""

    def used(self, node: PrefixNode) -> None:
        """Learn that a request has used a node, or that it is new."""

    def rank(self, node: PrefixNode) -> float:
        """Return the value of a node; the lowest makes room first."""

    def evicted(self, node: PrefixNode) -> None:
        """Learn that a node has made room."""


class LeastRecentlyUsed:
    """The node makes room whose last use is longest ago."""

    def __init__(self) -> None:
        self._clock = 0

    def used(self, node: PrefixNode) -> None:
        """Note the use."""
        self._clock += 1
        node.used_at = self._clock

    def rank(self, node: PrefixNode) -> float:
        """Return when it was last used."""
        return node.used_at

    def evicted(self, node: PrefixNode) -> None:
        """Forget nothing: what is known of a node goes with it."""
