"""The tree of KV that requests leave behind (RAGCache's knowledge tree, section 5.1), over runs of token ids.

RAGCache's nodes are documents. Here they are runs of tokens of any length, as in a radix tree: a node is split where
prompts part. Documents, questions and answers need no nodes of their own then, and a partial match counts.

Exact and fused KV lie in different nodes. Exact KV is that of a full prefill, and fused KV never stands before it. A
fused run whose tokens were chosen by a question is matched with that question or not at all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import numpy as np
from torch import Tensor

from fused_kv_llm.errors import FusedKVError

from .prefix_eviction import LeastRecentlyUsed, PrefixEviction
from .prefix_levels import HostLevel, PrefixLevels, SwapCounts
from .prefix_match import PrefixMatch
from .prefix_node import PrefixNode, PrefixRun, TokenIds

__all__ = ["PrefixTree"]


class PrefixTree:
    """KV by the tokens that lead to it; thread-safe.

    Parameters
    ----------
    max_bytes : int
        Most bytes of keys and values; with 0 nothing is kept.
    eviction : PrefixEviction or None
        Which nodes make room: those used longest ago, if None. Inner nodes never do before what stands behind them,
        and nodes that are pinned stay.
    host : HostLevel or None
        Where they go then; None forgets them.

    Attributes
    ----------
    version : int
        Goes up when something is forgotten on purpose.
    """

    def __init__(self, max_bytes: int, eviction: PrefixEviction | None = None, host: HostLevel | None = None) -> None:
        self._max_bytes = max_bytes
        self._eviction = eviction or LeastRecentlyUsed()
        self._levels = PrefixLevels(max_bytes, self._eviction, host)
        # Reentrant: the collector may end a dropped request, which unpins a node, while this thread holds it.
        self._lock = threading.RLock()
        self.version = 0
        self._empty()
        _trees.add(self)

    @property
    def max_bytes(self) -> int:
        """Most bytes that are kept."""
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that are kept on the device."""
        return self._levels.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes that are kept on the host besides."""
        return self._levels.host_nbytes

    @property
    def swaps(self) -> SwapCounts:
        """Bytes that went between device and host."""
        return self._levels.swaps

    @property
    def num_nodes(self) -> int:
        """Nodes that are kept."""
        with self._lock:
            return sum(1 for _ in self._root.below())

    def match(self, ids: Sequence[int], recipe: Hashable | None, exact_stop: int | None = None) -> PrefixMatch:
        """Find the KV of the longest prefix of `ids`, and pin it.

        Parameters
        ----------
        ids : sequence of int
        recipe : hashable or None
            None for KV that is exact; otherwise exact KV may be followed by fused KV of this recipe.
        exact_stop : int or None
            Exact KV is used of tokens before this one only; None for no such bound.

        Returns
        -------
        PrefixMatch
            Perhaps of no tokens. It is to be released.
        """
        tokens = np.asarray(ids, np.int64)
        with self._lock:
            path = self._longest(tokens, recipe, len(tokens) if exact_stop is None else exact_stop)
            for node, _ in path:
                self._eviction.used(node)
            if path:
                with self._pinned(path[-1][0]):
                    self._levels.bring(node for node, _ in path)
                    self._levels.keep_hot(node for node, count in path if count == node.num_tokens)
            return PrefixMatch(path, self.version, self._unpin)

    def known_tokens(self, ids: Sequence[int], recipe: Hashable | None, exact_stop: int | None = None) -> int:
        """Return of how many tokens :meth:`match` would find the KV; this is no use of them."""
        tokens = np.asarray(ids, np.int64)
        with self._lock:
            path = self._longest(tokens, recipe, len(tokens) if exact_stop is None else exact_stop)
            return sum(count for _, count in path)

    def insert(
        self,
        ids: Sequence[int],
        runs: Sequence[PrefixRun],
        keys: Tensor,
        values: Tensor,
        since: int | None = None,
        cached: int | None = None,
    ) -> int:
        """Keep a copy of what of a sequence's KV is not here yet, as far as there is room.

        Parameters
        ----------
        ids : sequence of int
        runs : sequence of PrefixRun
            How its tokens came by their KV, from the first on; all exact runs come first.
        keys, values : Tensor
            ``[L, Hkv, N, D]`` and ``[L, Hkv, N, Dv]`` of at least as many tokens as the runs have.
        since : int or None
            The :attr:`version` when the sequence was begun: nothing is kept if something was forgotten since, which it
            may be made of.
        cached : int or None
            How many of its tokens were found here: the others were computed. None takes it to be what is here now.

        Returns
        -------
        int
            How many of its first tokens are here now.

        Raises
        ------
        FusedKVError
            If the runs do not ascend, go beyond the tokens, or exact ones stand behind fused ones.
        """
        tokens = np.asarray(ids, np.int64)
        merged = _merged(runs, len(tokens))
        with self._lock:
            if self._max_bytes <= 0 or (since is not None and since != self.version):
                return 0
            node, at = self._root, 0
            for run in merged:
                while at < run.stop:
                    with self._pinned(node):
                        known = self._child(node, run, tokens, at)
                        if known is None and cached is None:
                            cached = at
                        child = known or self._grow(node, run, tokens, at, (keys, values))
                    if child is None:
                        return at
                    if known is None or (cached is not None and at >= cached):
                        behind = at if cached is None else min(at, cached)
                        self._eviction.computed(child, behind, merged[-1].stop - behind)
                    else:
                        self._eviction.kept(child)
                    with self._pinned(child):
                        if not self._levels.bring([child]):
                            return at + child.num_tokens
                    node, at = child, at + child.num_tokens
            return at

    def clear(self) -> None:
        """Forget everything; requests that use some of it keep what they have."""
        with self._lock:
            self._empty()
            self.version += 1

    def lose_device(self) -> None:
        """Note that the device's memory is lost: what has a copy on the host comes back when it is used."""
        with self._lock:
            self._levels.lose_device(self._root)
            # What requests have computed behind it is lost too.
            self.version += 1

    # -- inside ----------------------------------------------------------------------------------------------

    def _empty(self) -> None:
        self._root = PrefixNode(None, np.empty(0, np.int64), None, None, whole=False)
        self._levels.empty()

    def _longest(self, ids: TokenIds, recipe: Hashable | None, exact_stop: int) -> list[tuple[PrefixNode, int]]:
        """Return the nodes of the longest match with how many of their tokens are matched; exact ones where it ties."""
        best, most = list[tuple[PrefixNode, int]](), 0
        ways: list[tuple[PrefixNode, int, list[tuple[PrefixNode, int]]]] = [(self._root, 0, [])]
        while ways:
            node, at, path = ways.pop(0)
            for child, same in node.matching(ids[at:], recipe):
                count = same if child.recipe is not None else min(same, exact_stop - at)
                longer = [*path, (child, count)]
                if at + count > most:
                    best, most = longer, at + count
                if count == child.num_tokens:
                    ways.append((child, at + count, longer))
        return best

    def _child(self, node: PrefixNode, run: PrefixRun, ids: TokenIds, at: int) -> PrefixNode | None:
        """Return the node that has the run's next tokens, cut where they part."""
        rest = ids[at : run.stop]
        child = node.child_for(rest, run.recipe, whole=run.whole)
        if child is None:
            return None
        shared = child.shared(rest)
        if shared == child.num_tokens:
            return child
        head = child.split(shared)
        self._levels.cut(head)
        return head

    def _grow(
        self, node: PrefixNode, run: PrefixRun, ids: TokenIds, at: int, kv: tuple[Tensor, Tensor]
    ) -> PrefixNode | None:
        """Put a copy of a run's next tokens behind a node: all, or as many as there is room for."""
        token_nbytes = sum(tensor[:, :, :1].numel() * tensor.element_size() for tensor in kv)
        needed = (run.stop - at) * token_nbytes
        if run.whole and needed > self._max_bytes:
            return None
        stop = min(run.stop, at + self._levels.make_room(needed) // max(1, token_nbytes))
        if stop <= at or (run.whole and stop < run.stop):
            return None
        copied = kv[0][:, :, at:stop].clone(), kv[1][:, :, at:stop].clone()
        child = PrefixNode(node, ids[at:stop].copy(), run.recipe, copied, whole=run.whole)
        node.attach(child)
        # Ranked when it is used, which is next.
        self._levels.add(child)
        return child

    @contextmanager
    def _pinned(self, node: PrefixNode) -> Iterator[None]:
        node.pins += 1
        try:
            yield
        finally:
            node.pins -= 1

    def _unpin(self, node: PrefixNode) -> None:
        with self._lock:
            node.pins -= 1

    def _after_fork(self) -> None:
        """Begin anew: a thread that held the lock, or a node, is missing here."""
        self._lock = threading.RLock()
        self.clear()


def _merged(runs: Sequence[PrefixRun], num_tokens: int) -> list[PrefixRun]:
    """Return runs without empty ones, neighbours of one kind as one."""
    merged: list[PrefixRun] = []
    at, is_fused = 0, False
    for run in runs:
        if not at <= run.stop <= num_tokens or (is_fused and run.recipe is None):
            raise FusedKVError(
                f"The runs {list(runs)} of {num_tokens} tokens are not in order: a defect of the engine."
            )
        is_fused = is_fused or run.recipe is not None
        if run.stop == at:
            continue
        if merged and not run.whole and not merged[-1].whole and merged[-1].recipe == run.recipe:
            merged.pop()
        merged.append(run)
        at = run.stop
    return merged


_trees: WeakSet[PrefixTree] = WeakSet()


def _after_fork() -> None:
    for tree in list(_trees):
        tree._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
