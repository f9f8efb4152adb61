"""An order of retrieved chunks in which a prompt begins as an earlier one did (ContextPilot, arXiv 2511.03475).

Retrievers sort by similarity, so questions that share chunks have them in different places, and exact KV is of use only
up to the first difference. Another order is another prompt: whether the model answers it as well is for measurements.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from fused_kv_llm.chunk import chunk_texts

__all__ = ["ChunkOrders"]


class ChunkOrders:
    """The orders in which chunks stood in an engine's prompts; thread-safe. It knows hashes of texts, not the texts.

    It follows what was asked, not what the tree of answered prompts still has: an order whose KV made room is kept.

    Parameters
    ----------
    limit : int
        How many orders are remembered.
    """

    def __init__(self, limit: int = 1024) -> None:
        self._orders: deque[tuple[int, ...]] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def order(self, texts: Sequence[str], *, remember: bool = True) -> list[int]:
        """Return the places of texts in the order in which they share the longest beginning with an earlier prompt.

        Parameters
        ----------
        texts : sequence of str
            Chunks as they were retrieved, the best first.
        remember : bool
            Whether they are going to be asked about in this order.

        Returns
        -------
        list of int
            A permutation: first those that an earlier prompt began with, as they stood there, then the others as given.

        Raises
        ------
        CorpusError
            If one string was given instead of several, or a chunk is not text.
        """
        canonical = chunk_texts(texts)
        place: dict[int, int] = {}
        for at, text in enumerate(canonical):
            place.setdefault(hash(text), at)
        with self._lock:
            best, most = tuple[int, ...](), 0
            # Of those that share as much, the last one: its KV has most likely not made room.
            for known in self._orders:
                shared = next((at for at, name in enumerate(known) if name not in place), len(known))
                size = sum(len(canonical[place[name]]) for name in known[:shared])
                if size >= most:
                    best, most = known[:shared], size
            first = [place[name] for name in best]
            order = first + sorted(set(range(len(canonical))) - set(first))
            names = tuple(dict.fromkeys(hash(canonical[at]) for at in order))
            if remember and names:
                if names in self._orders:
                    self._orders.remove(names)
                self._orders.append(names)
        return order

    def clear(self) -> None:
        """Forget all orders."""
        with self._lock:
            self._orders.clear()
