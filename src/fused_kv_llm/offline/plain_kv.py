"""A cache of chunks' plain KV, used while other chunks are prefilled behind them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from fused_kv_llm.chunk import ChunkKV

__all__ = ["PlainKVCache"]


class PlainKVCache:
    """Keeps the plain KV that was used last, up to a number of bytes.

    Parameters
    ----------
    compute : callable
        Texts to their KV, in order.
    max_bytes : int
        What one call asks for is kept whatever its size.
    """

    def __init__(self, compute: Callable[[Sequence[str]], list[ChunkKV]], max_bytes: int) -> None:
        self._compute = compute
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, ChunkKV] = OrderedDict()
        self._nbytes = 0

    def get(self, texts: Iterable[str]) -> dict[str, ChunkKV]:
        """Return the KV of every text, computing what is not at hand."""
        wanted = list(dict.fromkeys(texts))
        missing = [text for text in wanted if text not in self._kept]
        for text, kv in zip(missing, self._compute(missing), strict=True):
            self._kept[text] = kv
            self._nbytes += kv.nbytes
        found = {}
        for text in wanted:
            self._kept.move_to_end(text)
            found[text] = self._kept[text]
        while self._nbytes > self._max_bytes and len(self._kept) > len(wanted):
            self._nbytes -= self._kept.popitem(last=False)[1].nbytes
        return found
