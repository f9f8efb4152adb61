"""On which level a node's KV lies: the device, the host, or both (RAGCache section 5.1, swap out only once).

The nodes on the device are the upper part of the tree, those on the host alone hang below them. A node that has to
leave the device is copied to the host the first time. The copy stays until the node is forgotten, so that later it
only has its device memory freed.

Nodes of the upper part that many requests use, such as a system prompt, are copied before they have to leave: should
the device's memory be lost, they come back from the host, and not all of the tree is lost with them (section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from .prefix_eviction import DEVICE, HOST, PrefixEviction
from .prefix_node import PrefixNode

__all__ = ["HostLevel", "PrefixLevels", "SwapCounts"]

# So many uses of a node make it hot.
_HOT_USES = 2

_Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HostLevel:
    """Where nodes go that have to leave the device.

    Parameters
    ----------
    max_bytes : int
        Most bytes of keys and values there.
    to_host, to_device : callable
        Copies a tensor.
    once : bool
        Whether copies stay on the host when a node is back on the device; False is for comparison.
    hot_share : float
        Most of `max_bytes` that copies of nodes may take that are used often and still on the device.
    """

    max_bytes: int
    to_host: _Move
    to_device: _Move
    once: bool = True
    hot_share: float = 0.25


@dataclass(slots=True)
class SwapCounts:
    """Bytes that went between the levels.

    Parameters
    ----------
    out_nbytes, in_nbytes : int
        Copied to the host, and back to the device.
    spared_nbytes : int
        Left the device without a copy, since the host had one.
    """

    out_nbytes: int = 0
    in_nbytes: int = 0
    spared_nbytes: int = 0


class PrefixLevels:
    """Keeps both levels of a tree within their bytes; not thread-safe.

    Parameters
    ----------
    max_bytes : int
        Most bytes on the device.
    eviction : PrefixEviction
        Which nodes make room, on either level.
    host : HostLevel or None
        None: what has to leave the device is forgotten.

    Attributes
    ----------
    nbytes, host_nbytes : int
        Bytes on the levels.
    leaves : set of PrefixNode
        Nodes on the device behind which no node on the device stands.
    swaps : SwapCounts
    """

    def __init__(self, max_bytes: int, eviction: PrefixEviction, host: HostLevel | None) -> None:
        self.max_bytes, self._eviction, self._host = max_bytes, eviction, host
        self.swaps = SwapCounts()
        self.empty()

    def empty(self) -> None:
        """Forget what there is; the counts stay."""
        self.nbytes = self.host_nbytes = 0
        self.leaves: set[PrefixNode] = set()
        self._away: set[PrefixNode] = set()
        # Those on the device that were copied before they had to leave it.
        self._hot: set[PrefixNode] = set()

    def add(self, node: PrefixNode) -> None:
        """Take in a node that is new, on the device."""
        if node.parent is not None:
            self.leaves.discard(node.parent)
        self.leaves.add(node)
        self.nbytes += node.nbytes

    def cut(self, head: PrefixNode) -> None:
        """Take in the first part of a node that was split."""
        if head.kv is None:
            self._away.add(head)
        if any(node in self._hot for node in head.children()):
            self._hot.add(head)

    def bring(self, path: Iterable[PrefixNode]) -> bool:
        """Copy nodes back to the device, from the root on, as far as there is room; whether all are there.

        The last of them is pinned.
        """
        for node in path:
            if node.kv is not None:
                continue
            if self._host is None or node.host_kv is None or not self._fits_behind(node.parent, node.host_nbytes):
                return False
            node.kv = self._host.to_device(node.host_kv[0]), self._host.to_device(node.host_kv[1])
            self.swaps.in_nbytes += node.nbytes
            self._away.discard(node)
            self.add(node)
            if not self._host.once:
                self.host_nbytes -= node.host_nbytes
                node.host_kv = None
        return True

    def keep_hot(self, path: Iterable[PrefixNode]) -> None:
        """Copy nodes to the host that are used often, from the root on, as far as their share of it goes.

        The last of them is pinned.
        """
        if self._host is None or not self._host.once:
            return
        for node in path:
            if node.host_kv is not None:
                continue
            if node.kv is None or self._eviction.uses(node) < _HOT_USES or not self._make_hot_room(node):
                return
            self._copy(node, node.kv, self._host)
            self._hot.add(node)

    def lose_device(self, root: PrefixNode) -> None:
        """Note that what is on the device is lost: nodes without a copy are forgotten, with all behind them."""
        every = list(root.below())
        for node in every:
            node.kv = None
        for node in every:
            if node.host_kv is None and node.parent is not None:
                for lost in (node, *node.below()):
                    self._forget_copy(lost)
                node.detach()
        self.nbytes, self.leaves, self._away, self._hot = 0, set(), set(root.below()), set()

    def make_room(self, nbytes: int) -> int:
        """Move leaves off the device until `nbytes` more fit, as far as that goes; return the bytes that are free."""
        stuck: set[PrefixNode] = set()
        while self.nbytes + nbytes > self.max_bytes:
            free = (one for one in self.leaves if not one.pins and one not in stuck)
            leaf = min(free, key=lambda one: self._eviction.rank(one, DEVICE), default=None)
            if leaf is None:
                break
            if not self._leave(leaf):
                stuck.add(leaf)
        return self.max_bytes - self.nbytes

    def _fits_behind(self, parent: PrefixNode | None, nbytes: int) -> bool:
        """Make room for a child of a node that has to stay on the device; return whether there is enough."""
        if parent is None:
            return False
        parent.pins += 1
        try:
            return self.make_room(nbytes) >= nbytes
        finally:
            parent.pins -= 1

    def _leave(self, leaf: PrefixNode) -> bool:
        """Move a node to the host, or forget it with all behind it; False if that is needed."""
        if leaf.host_kv is not None:
            self.swaps.spared_nbytes += leaf.nbytes
        elif self._host is not None and leaf.kv is not None and self._make_host_room(leaf.nbytes):
            self._copy(leaf, leaf.kv, self._host)
        elif any(node.pins for node in leaf.below()):
            return False
        self._eviction.evicted(leaf, DEVICE)
        self._free(leaf)
        if leaf.host_kv is not None:
            self._away.add(leaf)
            return True
        for node in leaf.below():
            self._forget_copy(node)
        leaf.detach()
        return True

    def _copy(self, node: PrefixNode, kv: tuple[Tensor, Tensor], host: HostLevel) -> None:
        node.host_kv = host.to_host(kv[0]), host.to_host(kv[1])
        self.host_nbytes += node.host_nbytes
        self.swaps.out_nbytes += node.nbytes

    def _make_hot_room(self, node: PrefixNode) -> bool:
        """Make room for the copy of a node that is used often, in place of those that are used less."""
        most = 0.0 if self._host is None else self._host.hot_share * self._host.max_bytes
        while sum(one.host_nbytes for one in self._hot) + node.nbytes > most:
            # The lowest first, since what comes back needs all that stands before it.
            ends = (one for one in self._hot if not any(child.host_kv for child in one.children()))
            least = min(ends, key=self._eviction.uses, default=None)
            if least is None or least is node.parent or self._eviction.uses(least) >= self._eviction.uses(node):
                return False
            self._forget_copy(least)
        return self._make_host_room(node.nbytes)

    def _free(self, leaf: PrefixNode) -> None:
        self.leaves.discard(leaf)
        # If it comes back its copy is one of those that are kept for the next time it has to leave.
        self._hot.discard(leaf)
        self.nbytes -= leaf.nbytes
        leaf.kv = None
        parent = leaf.parent
        if parent is not None and parent.kv is not None and not any(node.kv for node in parent.children()):
            self.leaves.add(parent)

    def _make_host_room(self, nbytes: int) -> bool:
        if self._host is None or nbytes > self._host.max_bytes:
            return False
        while self.host_nbytes + nbytes > self._host.max_bytes:
            free = (one for one in self._away if one.is_leaf and not one.pins)
            leaf = min(free, key=lambda one: self._eviction.rank(one, HOST), default=None)
            if leaf is None:
                return False
            self._eviction.evicted(leaf, HOST)
            self._forget_copy(leaf)
            leaf.detach()
        return True

    def _forget_copy(self, node: PrefixNode) -> None:
        self._away.discard(node)
        self._hot.discard(node)
        self.host_nbytes -= node.host_nbytes
        node.host_kv = None
