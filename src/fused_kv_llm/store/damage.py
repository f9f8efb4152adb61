"""What happens to a chunk whose file or row cannot be used: it is taken out of the store, with one warning."""

from __future__ import annotations

import warnings

from fused_kv_llm.errors import FusedKVWarning, StoreError
from fused_kv_llm.store.folder import StoreFolder
from fused_kv_llm.store.index import ChunkIndex, Place
from fused_kv_llm.store.read import FileReader
from fused_kv_llm.store.uses import UseLog

__all__ = ["DamageControl", "warn"]

_IGNORED = "is ignored until the store is opened again"


class DamageControl:
    """Takes damaged chunks out of a store.

    Parameters
    ----------
    folder, index, reader, uses : StoreFolder, ChunkIndex, FileReader, UseLog
        The parts of the store that know the chunk.
    read_only : bool
        Move and drop nothing, only stop using the chunk.

    Attributes
    ----------
    ignored : set of str
        Damaged chunks that could not be moved away: they count as not stored until they are written again.
    """

    def __init__(
        self, folder: StoreFolder, index: ChunkIndex, reader: FileReader, uses: UseLog, *, read_only: bool
    ) -> None:
        self._folder = folder
        self._index = index
        self._reader = reader
        self._uses = uses
        self._read_only = read_only
        self.ignored: set[str] = set()

    def discard(self, key: str, reason: str) -> bool:
        """Take a chunk out of the store and warn; returns False, silently, if there was nothing."""
        self._uses.add(damaged=1)
        path = self._folder.chunk_path(key)
        try:
            done = self._ignore(key) if self._read_only else self._quarantine(key)
        except StoreError as error:
            self.ignored.add(key)
            done = f"it could not be moved away ({error}) and {_IGNORED}"
        self._reader.forget(key)
        if done is None:
            return False
        warn(f"The stored KV of chunk {key} ({path}) cannot be used: {reason}; {done}. It is computed afresh.")
        return True

    def vanished(self, key: str) -> bool:
        """Handle a chunk whose file was missing when it was opened; True if that is damage.

        A file is missing for a moment while its chunk is evicted or put again. Inside a transaction, when no other
        process writes, the index tells the two cases apart.
        """
        if self._read_only:
            return False
        with self._index.transaction():
            place = self._index.ledger.place(key)
            if place is None or not place.on_disk or self._folder.has(key):
                return False
            if place.on_remote:
                self._index.ledger.move(key, Place(on_disk=False, on_remote=True))
            else:
                self._index.remove([key], "damaged")
        self._uses.add(damaged=1)
        self._reader.forget(key)
        where = self._folder.chunk_path(key)
        done = "the remote tier still has it" if place.on_remote else "its row was dropped. It is computed afresh"
        warn(f"The stored KV of chunk {key} ({where}) cannot be used: its file has vanished; {done}.")
        return True

    def discard_sidecar(self, key: str, name: str, reason: str) -> None:
        """Take a chunk's sidecar out of the store and warn."""
        self._reader.forget_sidecar(key, name)
        if not self._read_only:
            try:
                with self._index.transaction():
                    self._index.ledger.drop_sidecar(key, name)
                    self._folder.quarantine(key, name)
            except StoreError as error:
                reason = f"{reason}; it could not be moved away ({error})"
        warn(f"The sidecar {name!r} of chunk {key} cannot be used: {reason}.")

    def _quarantine(self, key: str) -> str | None:
        """Move a chunk's file and drop its row; return a text that says so, None if there was nothing."""
        with self._index.transaction():
            names = self._index.ledger.sidecars(key)
            for name in names:
                self._folder.remove(key, name)
            dropped = self._index.remove([key], "damaged")
            moved = self._folder.quarantine(key)
        self._reader.forget(key, *names)
        if moved is not None:
            return f"it was moved to {moved} and its row was dropped"
        return "its row was dropped" if dropped else None

    def _ignore(self, key: str) -> str | None:
        """Stop using a chunk that must not be moved; return a text that says so, None if there was nothing."""
        if key in self.ignored or not (self._folder.has(key) or self._index.present([key])):
            return None
        self.ignored.add(key)
        return f"the store is read-only, so it was left where it is and {_IGNORED}"


def warn(message: str) -> None:
    """Emit a ``FusedKVWarning``."""
    # Four levels up from here is the caller of KVStore.open or KVStore.discard, or close to it.
    warnings.warn(message, FusedKVWarning, stacklevel=4)
