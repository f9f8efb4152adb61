"""A node of the prefix tree: the KV of a run of tokens, and how it may be matched."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["PrefixNode", "PrefixRun", "TokenIds"]

TokenIds = NDArray[np.int64]
_ChildKey = tuple[Hashable | None, bool, int]


class PrefixRun(NamedTuple):
    """How the tokens up to a position came by their KV, from where the run before it stops.

    Parameters
    ----------
    stop : int
        The token after the last.
    recipe : hashable or None
        None: full prefill, nothing before it is fused. Otherwise everything that fused KV depends on besides tokens.
    whole : bool
        Whether it holds only together with all of its tokens, since what was recomputed in it was chosen by them.
    """

    stop: int
    recipe: Hashable | None = None
    whole: bool = False


class PrefixNode:
    """A run of tokens after those of its ancestors.

    Parameters
    ----------
    parent : PrefixNode or None
        None for the root, which has no tokens.
    ids : numpy.ndarray
        int64 ``[T]``.
    recipe, whole
        See :class:`PrefixRun`.
    kv : tuple of Tensor
        Keys ``[L, Hkv, T, D]`` at the positions where the tokens stand, and values ``[L, Hkv, T, Dv]``; contiguous,
        nobody else's, and never written to.

    Attributes
    ----------
    pins : int
        Requests that need it and its ancestors.
    about : object
        What the rule that ranks nodes knows of it; None before its first use.
    host_kv : tuple of Tensor or None
        A copy of its KV on the host, see :class:`.PrefixLevels`. Then `kv` may be None.
    """

    def __init__(
        self,
        parent: PrefixNode | None,
        ids: TokenIds,
        recipe: Hashable | None,
        kv: tuple[Tensor, Tensor] | None,
        *,
        whole: bool,
    ) -> None:
        self.parent, self.ids, self.recipe, self.whole, self.kv = parent, ids, recipe, whole, kv
        self.pins = 0
        self.about: object = None
        self.host_kv: tuple[Tensor, Tensor] | None = None
        self._children: dict[_ChildKey, list[PrefixNode]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of the run."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values on the device."""
        return 0 if self.kv is None else sum(tensor.nbytes for tensor in self.kv)

    @property
    def host_nbytes(self) -> int:
        """Bytes of its copy on the host."""
        return 0 if self.host_kv is None else sum(tensor.nbytes for tensor in self.host_kv)

    @property
    def is_leaf(self) -> bool:
        """Whether no node stands behind it."""
        return not self._children

    def children(self) -> Iterator[PrefixNode]:
        """Iterate over the nodes behind it."""
        for nodes in self._children.values():
            yield from nodes

    def below(self) -> Iterator[PrefixNode]:
        """Iterate over all nodes that stand behind it, at any distance."""
        found = list(self.children())
        while found:
            one = found.pop()
            yield one
            found.extend(one.children())

    def shared(self, ids: TokenIds) -> int:
        """Return how many of its tokens `ids` begin with; all or none of a node that is matched whole."""
        count = min(len(ids), len(self.ids))
        differs = np.flatnonzero(self.ids[:count] != ids[:count])
        found = int(differs[0]) if len(differs) else count
        return 0 if self.whole and found < len(self.ids) else found

    def matching(self, ids: TokenIds, recipe: Hashable | None) -> Iterator[tuple[PrefixNode, int]]:
        """Iterate over the nodes behind it that a look-up may use, each with how many of its tokens are the same.

        Parameters
        ----------
        ids : numpy.ndarray
            The tokens from here on.
        recipe : hashable or None
            Exact nodes answer every look-up; fused nodes those of their own recipe.
        """
        if not len(ids):
            return
        first = int(ids[0])
        keys: list[_ChildKey] = [(None, False, first)]
        if recipe is not None:
            keys += [(recipe, False, first), (recipe, True, first)]
        for key in keys:
            for node in self._children.get(key, ()):
                count = node.shared(ids)
                if count:
                    yield node, count

    def child_for(self, ids: TokenIds, recipe: Hashable | None, *, whole: bool) -> PrefixNode | None:
        """Return the node behind it to which tokens of a run belong, wholly or as far as they are the same."""
        nodes = self._children.get((recipe, whole, int(ids[0])), ())
        if whole:
            return next((node for node in nodes if np.array_equal(node.ids, ids)), None)
        return next(iter(nodes), None)

    def attach(self, child: PrefixNode) -> None:
        """Put a node behind this one."""
        child.parent = self
        self._children.setdefault(_key(child), []).append(child)

    def detach(self) -> None:
        """Take it, and all behind it, out of the tree."""
        parent, self.parent = self.parent, None
        if parent is not None:
            of_key = parent._children[_key(self)]
            of_key.remove(self)
            if not of_key:
                del parent._children[_key(self)]

    def split(self, count: int) -> PrefixNode:
        """Put the first `count` tokens into a node of their own, between its parent and itself, and return that.

        Whoever has pinned this node needs both, and this one keeps its ancestors.
        """
        missing = self.kv is None and self.host_kv is None
        if missing or self.parent is None or self.whole or not 0 < count < self.num_tokens:
            raise ValueError(f"a node of {self.num_tokens} tokens (whole={self.whole}) cannot be split at {count}")
        parent = self.parent
        self.detach()
        head = PrefixNode(parent, self.ids[:count].copy(), self.recipe, None, whole=False)
        head.about = self.about
        head.kv, self.kv = _cut(self.kv, count)
        head.host_kv, self.host_kv = _cut(self.host_kv, count)
        parent.attach(head)
        self.ids = self.ids[count:].copy()
        head.attach(self)
        return head


_KV = tuple[Tensor, Tensor] | None


def _cut(kv: _KV, count: int) -> tuple[_KV, _KV]:
    """Return the KV of the first `count` tokens and of the others: copies, so that each goes with its own memory."""
    if kv is None:
        return None, None
    keys, values = kv
    first = keys[:, :, :count].contiguous(), values[:, :, :count].contiguous()
    return first, (keys[:, :, count:].contiguous(), values[:, :, count:].contiguous())


def _key(node: PrefixNode) -> _ChildKey:
    return node.recipe, node.whole, int(node.ids[0])
