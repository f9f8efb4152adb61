"""Moving chunks between the disk and the remote tier: evictions demote, reads promote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fused_kv_llm.errors import ChunkDamagedError, ChunkKeyError, StoreError
from fused_kv_llm.store.damage import warn
from fused_kv_llm.store.folder import StoreFolder
from fused_kv_llm.store.format import FileCodec, file_name
from fused_kv_llm.store.index import ChunkIndex, Place
from fused_kv_llm.store.read import as_file, verify_chunk
from fused_kv_llm.store.remote import RemoteTier
from fused_kv_llm.store.uses import UseLog
from fused_kv_llm.store.writer import ChunkWriter

__all__ = ["Promoter", "demote"]


def demote(remote: RemoteTier | None, folder: StoreFolder, index: ChunkIndex, uses: UseLog, key: str) -> bool:
    """Copy a chunk's files to the remote tier; False if there is none, or it cannot take them."""
    if remote is None:
        return False
    try:
        for name in (None, *index.ledger.sidecars(key)):
            fd = folder.open_file(key, name)
            with open(fd, "rb") as file:
                remote.put(file_name(key, name), [memoryview(file.read())])
    except FileNotFoundError:
        # Another process has evicted or deleted the chunk.
        return False
    except (StoreError, OSError) as error:
        warn(f"Chunk {key[:16]} could not be copied to the remote tier and is lost when it is evicted: {error}")
        return False
    uses.add(demoted=1)
    return True


class Promoter:
    """Brings chunks from the remote tier to the disk.

    Parameters
    ----------
    remote : RemoteTier
    folder, index, writer, uses : StoreFolder, ChunkIndex, ChunkWriter, UseLog
        The store's.
    codec : FileCodec
        Decodes the files, to verify them.
    """

    def __init__(
        self,
        remote: RemoteTier,
        folder: StoreFolder,
        index: ChunkIndex,
        writer: ChunkWriter,
        uses: UseLog,
        codec: FileCodec,
    ) -> None:
        self.remote = remote
        self._folder = folder
        self._index = index
        self._writer = writer
        self._uses = uses
        self._codec = codec

    def fetch(self, keys: Sequence[str]) -> set[str]:
        """Copy those chunks to the disk that are only on the remote tier, in one call; return their keys.

        Raises
        ------
        StoreUnavailableError, StoreFullError
            The remote tier or the disk cannot be used.
        """
        places = {key: self._index.ledger.place(key) for key in keys}
        away = {key: place for key, place in places.items() if place is not None and not place.on_disk}
        wanted = {key: (None, *self._index.ledger.sidecars(key)) for key in away}
        if not wanted:
            return set()
        data = self.remote.get([file_name(key, name) for key, names in wanted.items() for name in names])
        fetched: set[str] = set()
        for key, names in wanted.items():
            files = {n: memoryview(data[file_name(key, n)]) for n in names if file_name(key, n) in data}
            if self._keep(key, files, away[key]):
                fetched.add(key)
        self._uses.add(promoted=len(fetched))
        return fetched

    def _keep(self, key: str, files: dict[str | None, memoryview], place: Place) -> bool:
        if None not in files:
            if self._drop(key):
                self.report(key, "the remote tier does not have it any more")
            return False
        if not self._is_whole(key, files[None]):
            return False
        self._writer.promote(key, files, place)
        return True

    def _is_whole(self, key: str, data: memoryview) -> bool:
        with as_file(data) as fd:
            try:
                verify_chunk(self._codec, fd, key)
            except ChunkDamagedError as error:
                self._drop(key)
                self.refuse(key, error)
                return False
        return True

    def _drop(self, key: str) -> bool:
        with self._index.transaction():
            place = self._index.ledger.place(key)
            if place is None or place.on_disk:
                # Another process has deleted the chunk, or copied it to the disk.
                return False
            self._index.remove([key], "damaged")
        return True

    def refuse(self, key: str, error: ChunkDamagedError) -> None:
        """Report a chunk's object that was read and cannot be used, and delete it, so that a sound one can follow."""
        self.report(key, error.reason)
        # A file of another key is undamaged, and belongs to somebody else.
        if not isinstance(error, ChunkKeyError):
            self.remote.delete([file_name(key)])

    def report(self, key: str, reason: str, then: str = "It is computed afresh.") -> None:
        """Count and warn about a chunk on the remote tier that cannot be used."""
        self._uses.add(damaged=1)
        warn(f"The KV of chunk {key} on {self.remote.url} cannot be used: {reason}. {then}")

    def forget(self, keys: Iterable[str]) -> None:
        """Delete chunks from the remote tier; those that are not there do not matter."""
        names = [file_name(key, name) for key in keys for name in (None, *self._index.ledger.sidecars(key))]
        self.remote.delete(names)
