"""On which level a node's KV lies: the device, the host, or both (RAGCache section 5.1, swap out only once).

The nodes on the device are the upper part of the tree, those on the host alone hang below them. A node that has to
leave the device is copied to the host the first time. The copy stays until the node is forgotten, so that later it
only has its device memory freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from .prefix_eviction import DEVICE, HOST, PrefixEviction
from .prefix_node import PrefixNode

__all__ = ["HostLevel", "PrefixLevels", "SwapCounts"]

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
    """

    max_bytes: int
    to_host: _Move
    to_device: _Move
    once: bool = True


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

    def make_room(self, nbytes: int) -> int:
        """Move leaves off the device until so many bytes fit, if they ever can; return how many do."""
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
        """Make room for a node whose parent, perhaps a leaf of the device now, has to stay there."""
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
            leaf.host_kv = self._host.to_host(leaf.kv[0]), self._host.to_host(leaf.kv[1])
            self.host_nbytes += leaf.host_nbytes
            self.swaps.out_nbytes += leaf.nbytes
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

    def _free(self, leaf: PrefixNode) -> None:
        self.leaves.discard(leaf)
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
        self.host_nbytes -= node.host_nbytes
        node.host_kv = None
