"""The store's tiers with the library's own memory tier, disk budget and ledger, and no files."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fused_kv_llm.store import resolve_policy
from fused_kv_llm.store.budget import DiskBudget
from fused_kv_llm.store.index import ChunkIndex, Place
from fused_kv_llm.store.read.memory import MemoryTier
from fused_kv_llm.store.uses import UseLog

from .hardware import Hardware

__all__ = ["MISSED", "ChunkTiers"]

MISSED = "missed"


class ChunkTiers:
    """Where chunks are.

    Parameters
    ----------
    chunk_nbytes : sequence of int
        By chunk.
    chunk_costs : sequence of float
        What computing a chunk alone costs, as a number of tokens.
    hardware : Hardware
    policy : str
        A name of ``POLICIES``.
    world_s : callable
        The simulated time.

    Attributes
    ----------
    hits : Counter of str
        Chunks by the tier that they were opened in.
    """

    def __init__(
        self,
        chunk_nbytes: list[int],
        chunk_costs: list[float],
        hardware: Hardware,
        policy: str,
        world_s: Callable[[], float],
    ) -> None:
        self.nbytes, self._costs, self._world_s = chunk_nbytes, chunk_costs, world_s
        self.hits: Counter[str] = Counter()
        rule = resolve_policy(policy)
        self.memory = MemoryTier(hardware.host_bytes, rule)
        self._folder = tempfile.TemporaryDirectory(prefix="fused-kv-simulation-")
        self._index = ChunkIndex(Path(self._folder.name) / "index.sqlite", rule, None, read_only=False)
        self._uses = UseLog(world_s, world_s)
        self._has_remote = hardware.remote is not None
        self._budget = DiskBudget(hardware.disk_bytes, _NoFiles(), self._index, self._uses, self._demote)  # type: ignore[arg-type]
        self._disk_bytes = hardware.disk_bytes

    def close(self) -> None:
        """Give the index's file back."""
        self._index.close()
        self._folder.cleanup()

    @property
    def disk_nbytes(self) -> int:
        """Bytes on the disk."""
        return int(self._index.ledger.total("disk_nbytes"))

    def has(self, chunk: int) -> bool:
        """Whether a chunk is stored; this is no use of it."""
        return self._index.ledger.place(_key(chunk)) is not None

    def open(self, chunk: int) -> str:
        """Return the tier that a chunk is found in, and count the use."""
        tier = self._tier_of(chunk)
        self.hits[tier] += 1
        if tier == MISSED:
            return tier
        if tier == "remote":
            self._promote(chunk)
        if self._uses.hit(_key(chunk), tier):
            self._budget.flush_uses()
        return tier

    def read(self, chunk: int) -> None:
        """Hold a chunk in memory, all of which was read."""
        if _key(chunk) not in self.memory:
            header = SimpleNamespace(key=_key(chunk), file_name=_key(chunk), nbytes=self.nbytes[chunk], name=None)
            self.memory.put(SimpleNamespace(header=header))  # type: ignore[arg-type]

    def put(self, chunks: Iterable[int]) -> None:
        """Store chunks that are not stored."""
        for chunk in chunks:
            key, nbytes = _key(chunk), self.nbytes[chunk]
            if nbytes > self._disk_bytes or self._index.ledger.place(key) is not None:
                continue
            self._budget.make_room(nbytes)
            with self._index.transaction():
                place = Place(on_disk=True, on_remote=False)
                self._index.ledger.add(key, nbytes, self._costs[chunk], self._world_s(), place)

    def fill(self, chunks: Iterable[int]) -> None:
        """Store a corpus before anybody asks: what does not fit on the disk is elsewhere, or nowhere."""
        with self._index.transaction():
            free = self._disk_bytes - self.disk_nbytes
            for chunk in chunks:
                nbytes = self.nbytes[chunk]
                on_disk = nbytes <= free
                if on_disk or self._has_remote:
                    place = Place(on_disk=on_disk, on_remote=self._has_remote)
                    self._index.ledger.add(_key(chunk), nbytes, self._costs[chunk], 0.0, place)
                    free -= nbytes * on_disk

    def _tier_of(self, chunk: int) -> str:
        key = _key(chunk)
        place = self._index.ledger.place(key)
        if place is None:
            # Nobody asks for a chunk without a row, even if its tensors are in memory still.
            self.memory.discard(key)
            return MISSED
        if self.memory.get(key) is not None:
            return "memory"
        return "disk" if place.on_disk else "remote"

    def _promote(self, chunk: int) -> None:
        key, nbytes = _key(chunk), self.nbytes[chunk]
        if nbytes > self._disk_bytes:
            return
        self._budget.make_room(nbytes)
        with self._index.transaction():
            self._index.ledger.move(key, Place(on_disk=True, on_remote=True), nbytes)

    def _demote(self, key: str) -> bool:
        return self._has_remote


class _NoFiles:
    """A folder of which everything can be evicted."""

    root = "a simulated folder"

    def evict(self, key: str) -> bool:
        """Let go of a file."""
        return True

    def remove(self, key: str, name: Any) -> None:
        """Let go of a sidecar."""


def _key(chunk: int) -> str:
    return f"{chunk:064x}"
