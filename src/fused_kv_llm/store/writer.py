"""Storing a chunk: its bytes, then its place, then its row, each step entirely or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from fused_kv_llm.chunk import ContentHash
from fused_kv_llm.errors import ConfigError, StoreError, StoreFullError
from fused_kv_llm.store.budget import DiskBudget
from fused_kv_llm.store.folder import StoreFolder
from fused_kv_llm.store.index import ChunkIndex, ChunkRow, Place
from fused_kv_llm.store.uses import UseLog

__all__ = ["ChunkWriter"]

_PUT_LOCKS = 64
_ATTEMPTS = 20


class ChunkWriter:
    """Writes chunks and sidecars; thread-safe, and safe beside other processes.

    Parameters
    ----------
    folder, index, budget, uses : StoreFolder, ChunkIndex, DiskBudget, UseLog
        The store's.
    ignored : set of str
        Damaged chunks that could not be moved away: they count as not stored, and leave the set when written.
    """

    def __init__(
        self,
        folder: StoreFolder,
        index: ChunkIndex,
        budget: DiskBudget,
        uses: UseLog,
        ignored: set[str],
    ) -> None:
        self._folder = folder
        self._index = index
        self._budget = budget
        self._uses = uses
        self._ignored = ignored
        self._locks = [threading.Lock() for _ in range(_PUT_LOCKS)]

    def lock(self, key: str) -> threading.Lock:
        """Return the lock that keeps two threads from writing the same chunk twice."""
        return self._locks[int(key[:8], 16) % _PUT_LOCKS]

    def is_stored(self, key: str) -> bool:
        """Whether a chunk has its row, and its file where the row says."""
        place = None if key in self._ignored else self._index.ledger.place(key)
        if place is None:
            return False
        return self._folder.has(key) if place.on_disk else place.on_remote

    def write(self, row: ChunkRow, content: ContentHash, parts: Sequence[memoryview], cost: float) -> bool:
        """Write a chunk's file and its row; False if another process has stored it meanwhile.

        Raises
        ------
        StoreFullError, StoreUnavailableError
            The store is as it was.
        """
        self._budget.make_room(row.nbytes)
        with self._folder.staging.staged(row.key, parts) as staged:
            for _ in range(_ATTEMPTS):
                done = self._publish(staged, row, content, cost)
                if done is not None:
                    return done
                # Another process has used the room.
                self._budget.make_room(row.nbytes)
        raise StoreFullError(f"Other processes keep filling the disk budget of {self._folder.root}. Raise disk_bytes.")

    def _publish(self, staged: str, row: ChunkRow, content: ContentHash, cost: float) -> bool | None:
        """Move a staged file to its place and add its row; None if there is no room in the budget."""
        try:
            with self._index.transaction():
                if self.is_stored(row.key):
                    return False
                # Sidecars of a file that vanished go, as do those of a damaged one.
                for name in self._index.ledger.sidecars(row.key):
                    self._folder.remove(row.key, name)
                # Always a new row: its new rowid makes content indexes see the chunk again.
                self._index.remove([row.key])
                if not self._budget.fits(row.nbytes):
                    return None
                self._folder.publish(staged, row.key)
                self._index.add(row, content)
                self._index.ledger.add(row.key, row.nbytes, cost, time.time(), Place(on_disk=True, on_remote=False))
        except StoreError:
            with self._index.transaction():
                if not self._index.present([row.key]):
                    self._folder.remove(row.key)
            raise
        self._ignored.discard(row.key)
        self._uses.add(puts=1, bytes_written=row.nbytes)
        return True

    def promote(self, key: str, files: Mapping[str | None, memoryview], place: Place) -> None:
        """Write a chunk's verified files from the remote tier back to the disk, all at once."""
        nbytes = sum(map(len, files.values()))
        self._budget.make_room(nbytes)
        with ExitStack() as stack:
            staged = {
                name: stack.enter_context(self._folder.staging.staged(key, [data])) for name, data in files.items()
            }
            with self._index.transaction():
                if self._index.ledger.place(key) != place:
                    return
                for gone in self._index.ledger.sidecars(key).keys() - files.keys():
                    self._index.ledger.drop_sidecar(key, gone)
                # The chunk comes last, so that its sidecars are there when it is.
                for name in sorted(files, key=lambda name: name is None):
                    self._folder.publish(staged[name], key, name)
                self._index.ledger.move(key, Place(on_disk=True, on_remote=place.on_remote), nbytes)

    def write_sidecar(self, key: str, name: str, parts: Sequence[memoryview]) -> int | None:
        """Write a sidecar of a chunk that is stored, replacing an old one.

        Returns
        -------
        int or None
            Its bytes; None if the chunk is on the remote tier only, and has to be brought first.

        Raises
        ------
        ConfigError
            The chunk is not stored.
        StoreFullError, StoreUnavailableError
            The store is as it was.
        """
        nbytes = sum(map(len, parts))
        with ExitStack() as stack:
            # The chunk itself may be the one of least value: it must not be evicted to make room for its sidecar.
            stack.enter_context(self._folder.held(key))
            self._budget.make_room(nbytes)
            staged = stack.enter_context(self._folder.staging.staged(key, parts))
            stack.enter_context(self._index.transaction())
            place = self._index.ledger.place(key)
            if place is None:
                raise ConfigError(f"The chunk {key[:16]} is not stored, so it can have no sidecar. Put it first.")
            if not place.on_disk:
                return None
            self._index.ledger.add_sidecar(key, name, nbytes)
            # The copy on the remote tier lacks this sidecar, so the next eviction copies the chunk again.
            self._index.ledger.move(key, Place(on_disk=True, on_remote=False))
            self._folder.publish(staged, key, name)
        return nbytes
