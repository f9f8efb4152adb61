"""What a replica publishes for routers: names of resident chunks and conversations, and how busy it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.prompt import content_hash, is_indexable

from .chunk_names import chunk_name
from .placement import Held, RoutingKey

__all__ = ["MOST_CHUNKS", "MOST_CONVERSATIONS", "ReplicaStats", "held_of", "load_of"]

MOST_CHUNKS = 4096
"""Chunks of a replica that are published, eight bytes each; of more, those with the most bytes."""
MOST_CONVERSATIONS = 1024
"""Conversations of a replica that are published, the last ones."""
_VERSION = 1


class ReplicaStats:
    """Collects what a replica holds; used by one thread at a time.

    Parameters
    ----------
    most_chunks, most_conversations : int
    """

    def __init__(self, most_chunks: int = MOST_CHUNKS, most_conversations: int = MOST_CONVERSATIONS) -> None:
        self._most_chunks, self._most_conversations = most_chunks, most_conversations
        self._conversations: OrderedDict[int, None] = OrderedDict()
        # By engine's tenant and chunk key; only of chunks that were resident the last time.
        self._names: dict[tuple[str, str], int] = {}

    def answered(self, key: RoutingKey) -> None:
        """Note that a request is answered here, so that its conversation had better go on here."""
        for part in key.prefixes[:1]:
            self._conversations[part.key] = None
            self._conversations.move_to_end(part.key)
        while len(self._conversations) > self._most_conversations:
            self._conversations.popitem(last=False)

    def published(self, engines: Iterable[tuple[str, FusedKVEngine]], running: int, waiting: int) -> dict[str, Any]:
        """Return what routers are told.

        Parameters
        ----------
        engines : iterable of tuple
            What each tenant is called below the server's own, and its engine.
        running, waiting : int
            Requests of this replica.
        """
        sizes = self._resident(engines)
        most = sorted(sizes, key=lambda name: -sizes[name])[: self._most_chunks]
        return {
            "version": _VERSION,
            "chunks": np.array(most, np.uint64).tobytes(),
            "chunks_left_out": len(sizes) - len(most),
            "conversations": np.array(list(self._conversations), np.uint64).tobytes(),
            "running": running,
            "waiting": waiting,
        }

    def _resident(self, engines: Iterable[tuple[str, FusedKVEngine]]) -> dict[int, int]:
        names: dict[tuple[str, str], int] = {}
        sizes: dict[int, int] = {}
        for tenant, engine in engines:
            resident = engine.store.resident()
            known = {key: self._names[tenant, key] for key in resident if (tenant, key) in self._names}
            known |= dict(_names_of(engine, tenant, [key for key in resident if key not in known]))
            names |= {(tenant, key): name for key, name in known.items()}
            sizes |= {name: resident[key] for key, name in known.items()}
        self._names = names
        return sizes


def _names_of(engine: FusedKVEngine, tenant: str, keys: list[str]) -> Iterator[tuple[str, int]]:
    # What has been deleted since has no row; it will not be resident for long.
    for key, row in engine.store.rows(keys).items() if keys else ():
        if is_indexable(row.text):
            yield key, chunk_name(content_hash(row.text).full, tenant)


def held_of(stats: Mapping[str, Any]) -> Held:
    """Return what a replica holds by what it published; nothing if it has not, or speaks another version."""
    if stats.get("version") != _VERSION:
        return Held()
    chunks, conversations = (np.frombuffer(stats[name], np.uint64) for name in ("chunks", "conversations"))
    return Held(frozenset(chunks.tolist()), frozenset(conversations.tolist()))


def load_of(stats: Mapping[str, Any]) -> float:
    """Return how many requests a replica had when it published."""
    return float(stats.get("running", 0) + stats.get("waiting", 0))
