"""``KVStore``: the chunk KV of a corpus on disk, and the recently used ones in memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from fused_kv_llm.chunk import ChunkKV, ContentHash
from fused_kv_llm.errors import ChunkDamagedError, StoreError, StoreUnavailableError
from fused_kv_llm.store.damage import DamageControl, warn
from fused_kv_llm.store.file_format import encode_chunk
from fused_kv_llm.store.index import ChunkIndex, ChunkRow, ContentRows
from fused_kv_llm.store.layout import StoreFolder, check_key
from fused_kv_llm.store.loader import ChunkLoader
from fused_kv_llm.store.memory import MemoryTier
from fused_kv_llm.store.prefetch import Prefetcher
from fused_kv_llm.store.reader import ChunkReader
from fused_kv_llm.store.stored_kv import StoredKV

__all__ = ["KVStore", "StoreStats"]

_GIB = 1 << 30
_PUT_LOCKS = 64


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds.

    Parameters
    ----------
    chunks, tokens, bytes_on_disk : int
        Chunks in the index, their tokens, and the size of their files.
    memory_chunks, memory_bytes : int
        Chunks in this process's memory tier and the bytes of their keys and values.
    by_identity : dict of str to int
        Chunks by identity digest.
    """

    chunks: int
    tokens: int
    bytes_on_disk: int
    memory_chunks: int
    memory_bytes: int
    by_identity: dict[str, int] = field(default_factory=dict)


class KVStore:
    """Chunk KV in a folder; thread-safe, and safe for several processes on the same folder.

    A damaged, foreign or outdated file is a miss: it is moved to ``kv_dir/quarantine``, its row is dropped
    and a ``FusedKVWarning`` says so. It is never a wrong tensor and never a crash.

    Parameters
    ----------
    kv_dir : str or Path
        The folder, created (with mode 0700) if it does not exist. On a local POSIX disk.
    memory_bytes : int
        Most bytes of keys and values kept in memory; 0 keeps none.
    read_only : bool
        Change nothing in the folder.

    Raises
    ------
    ConfigError
        ``memory_bytes`` is negative, or a key is not one of ``chunk_key``.
    StoreUnavailableError
        The folder cannot be created, read or written, or its index is damaged.
    """

    def __init__(self, kv_dir: str | Path, *, memory_bytes: int = 2 * _GIB, read_only: bool = False) -> None:
        self.kv_dir = Path(kv_dir).expanduser()
        self._read_only = read_only
        self._memory = MemoryTier(memory_bytes)
        self._folder = StoreFolder(self.kv_dir, read_only=read_only)
        self._index = ChunkIndex(self._folder.index_path, read_only=read_only)
        self._reader = ChunkReader(self._folder, self._memory)
        self._prefetcher = Prefetcher(self._reader, memory_bytes)
        self._put_locks = [threading.Lock() for _ in range(_PUT_LOCKS)]
        self._damage = DamageControl(self._folder, self._index, self._reader, read_only=read_only)
        self._closed = False

    def put(self, key: str, identity: str, text: str, content: ContentHash, kv: ChunkKV) -> int:
        """Store a chunk's KV, unless it is stored already.

        Parameters
        ----------
        key : str
            ``chunk_key(identity, kv.token_ids)``.
        identity : str
            ``KVIdentity.digest``.
        text : str
            The chunk's text.
        content : ContentHash
            Hashes of the text.
        kv : ChunkKV
            Keys and values, float32, float16 or bfloat16, on any device.

        Returns
        -------
        int
            Bytes written; 0 if the chunk was there already.

        Raises
        ------
        ConfigError
            The key, text, hashes or KV cannot be stored.
        StoreFullError
            The disk is full; the store is as it was.
        StoreUnavailableError
            The store is closed, read-only or cannot be written; it is as it was.
        """
        self._check_writable()
        check_key(key)
        # Threads with the same chunk wait here instead of writing it twice.
        with self._put_locks[int(key[:8], 16) % _PUT_LOCKS]:
            if self._is_stored(key):
                return 0
            parts = encode_chunk(key, identity, text, content, kv)
            nbytes = sum(len(part) for part in parts)
            row = ChunkRow(key, identity, text, tuple(kv.token_ids), kv.position, nbytes)
            with self._folder.staged(key, parts) as staged:
                return nbytes if self._publish(staged, row, content) else 0

    def contains(self, keys: Iterable[str]) -> set[str]:
        """Return those of ``keys`` that are stored."""
        self._check_open()
        return self._index.present(check_key(key) for key in keys) - self._damage.ignored

    def rows(self, keys: Iterable[str]) -> dict[str, ChunkRow]:
        """Return what the index knows about those of ``keys`` that are stored."""
        self._check_open()
        rows, damaged = self._index.rows(check_key(key) for key in keys if key not in self._damage.ignored)
        for key in damaged:
            self.discard(key, "its row in the index cannot be understood")
        return rows

    def content_rows(self, identity: str, after_rowid: int = 0) -> tuple[ContentRows, list[str]]:
        """Return content hashes of an identity's chunks that were added after a ``rowid``.

        Parameters
        ----------
        identity : str
            ``KVIdentity.digest``.
        after_rowid : int
            The last ``rowid`` seen; 0 for all.

        Returns
        -------
        rows : ContentRows
            Arrays ``rowid, prefix, full, length``, ascending by ``rowid``.
        keys : list of str
            The chunks' keys, in the same order.
        """
        self._check_open()
        return self._index.content_rows(identity, after_rowid)

    def open(self, key: str, token_ids: Sequence[int]) -> StoredKV | None:
        """Open a chunk's KV for reading.

        Parameters
        ----------
        key : str
            The chunk.
        token_ids : sequence of int
            The chunk's stand-alone token ids; a hit has exactly these.

        Returns
        -------
        StoredKV or None
            None if the chunk is not stored, or not usable (with a ``FusedKVWarning``).
        """
        self._check_open()
        check_key(key)
        if key in self._damage.ignored:
            return None
        try:
            source = self._reader.acquire(key)
        except FileNotFoundError:
            self.discard(key, "its file has vanished")
            return None
        except ChunkDamagedError as error:
            self.discard(key, error.reason)
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                self.discard(key, "it is not a regular file")
            else:
                warn(f"The stored KV of chunk {key} cannot be read now ({error}). It is computed afresh.")
            return None
        if source.header.token_ids != tuple(token_ids):
            source.release()
            self.discard(key, f"its {source.header.num_tokens} token ids are not those expected")
            return None
        return StoredKV("disk" if isinstance(source, ChunkLoader) else "memory", source)

    def discard(self, key: str, reason: str) -> bool:
        """Take a damaged chunk out of the store and warn about it.

        The file is moved to ``kv_dir/quarantine`` and the row is dropped; in a read-only store this process
        just stops using the chunk.

        Parameters
        ----------
        key, reason : str
            ``ChunkDamagedError.key`` and ``ChunkDamagedError.reason``.

        Returns
        -------
        bool
            Whether there was anything to take out; only then it warns.
        """
        self._check_open()
        return self._damage.discard(check_key(key), reason)

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start loading chunks into the memory tier and return at once.

        Stops at the memory tier's budget. Chunks that are missing or damaged are left for ``open`` to report.
        """
        self._check_open()
        self._prefetcher.submit([check_key(key) for key in keys if key not in self._damage.ignored])

    def delete(self, keys: Iterable[str]) -> int:
        """Delete chunks; returns how many were stored."""
        self._check_writable()
        wanted = [check_key(key) for key in keys]
        with self._index.transaction():
            deleted = self._index.remove(wanted)
            deleted.update(key for key in wanted if self._folder.remove(key))
        for key in wanted:
            self._reader.forget(key)
        return len(deleted)

    def drop_memory(self) -> None:
        """Empty the memory tier, so that every chunk is read from the disk again."""
        self._reader.forget_all()

    def stats(self) -> StoreStats:
        """Return what the store holds."""
        self._check_open()
        totals = self._index.totals()
        memory_chunks, memory_bytes = self._memory.usage()
        return StoreStats(
            chunks=sum(row[1] for row in totals),
            tokens=sum(row[2] for row in totals),
            bytes_on_disk=sum(row[3] for row in totals),
            memory_chunks=memory_chunks,
            memory_bytes=memory_bytes,
            by_identity={row[0]: row[1] for row in totals},
        )

    def free_bytes(self) -> int:
        """Return how many bytes the disk has left."""
        return self._folder.free_bytes()

    def close(self) -> None:
        """Stop prefetching, wait for its thread, close the index and empty the memory tier.

        Chunks that are open stay readable. Closing twice is harmless.
        """
        self._closed = True
        self._prefetcher.close()
        self._index.close()
        self._reader.forget_all()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_stored(self, key: str) -> bool:
        if key in self._damage.ignored or not self._folder.has(key):
            return False
        return bool(self._index.present([key]))

    def _publish(self, staged: str, row: ChunkRow, content: ContentHash) -> bool:
        """Give a staged file its place and its row; False if another process was faster."""
        try:
            with self._index.transaction():
                if self._is_stored(row.key):
                    return False
                # Never an old row: a new rowid lets content indexes see the chunk again.
                self._index.remove([row.key])
                self._folder.publish(staged, row.key)
                self._index.add(row, content)
        except StoreError:
            with self._index.transaction():
                if not self._index.present([row.key]):
                    self._folder.remove(row.key)
            raise
        self._damage.ignored.discard(row.key)
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError(f"The store in {self.kv_dir} was closed. Open a new KVStore.")

    def _check_writable(self) -> None:
        self._check_open()
        if self._read_only:
            raise StoreUnavailableError(
                f"The store in {self.kv_dir} was opened with read_only=True. Open it without, to change it."
            )
