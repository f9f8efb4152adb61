"""What the prefix tree has of a prompt, held for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .prefix_node import PrefixNode, PrefixRun

__all__ = ["PrefixMatch"]


class PrefixMatch:
    """The KV of a prompt's first tokens; it stays in the tree until it is released.

    Parameters
    ----------
    path : sequence of (PrefixNode, int)
        Nodes one behind another, and how many tokens of each are matched: all, but of the last.
    version : int
        The tree's, see :meth:`.PrefixTree.insert`.
    unpin : callable
        Takes back a pin.

    Attributes
    ----------
    num_tokens : int
        Tokens matched.
    runs : list of PrefixRun
        How they came by their KV.
    is_exact : bool
        Whether all of it is that of a full prefill.
    """

    def __init__(
        self, path: Sequence[tuple[PrefixNode, int]], version: int, unpin: Callable[[PrefixNode], None]
    ) -> None:
        self.version, self._unpin = version, unpin
        self.runs: list[PrefixRun] = []
        self._kv: list[tuple[Tensor, Tensor]] = []
        self.num_tokens = 0
        for node, count in path:
            kv = node.kv or node.host_kv
            if kv is not None:
                self._kv.append((kv[0][:, :, :count], kv[1][:, :, :count]))
                self.num_tokens += count
                self.runs.append(PrefixRun(self.num_tokens, node.recipe, node.whole))
        self.is_exact = all(run.recipe is None for run in self.runs)
        # Its ancestors are no leaves, so they stay as well.
        self._last = path[-1][0] if path else None
        if self._last is not None:
            self._last.pins += 1

    def write(self, keys: Tensor, values: Tensor, num_tokens: int) -> None:
        """Copy the KV of the first `num_tokens` tokens to ``[L, Hkv, N, D]`` and ``[L, Hkv, N, Dv]``."""
        at = 0
        for one_keys, one_values in self._kv:
            count = min(one_keys.shape[2], num_tokens - at)
            if count <= 0:
                return
            keys[:, :, at : at + count] = one_keys[:, :, :count]
            values[:, :, at : at + count] = one_values[:, :, :count]
            at += count

    def release(self) -> None:
        """Let the tree evict it; releasing twice is harmless. What was copied stays valid."""
        last, self._last = self._last, None
        self._kv = []
        if last is not None:
            self._unpin(last)
