"""``KVStore``: the chunk KV of a corpus in memory, on disk and on a remote tier, behind one face."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

from fused_kv_llm.chunk import ChunkKV, ContentHash
from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.damage import warn
from fused_kv_llm.store.format import check_key, encode_chunk
from fused_kv_llm.store.index import ChunkRow, ContentRows
from fused_kv_llm.store.read import ChunkLoader, ResidentChunk, StoredKV
from fused_kv_llm.store.upkeep import StoreUpkeep

__all__ = ["KVStore"]


class KVStore(StoreUpkeep):
    """Chunk KV in a folder; thread-safe, and safe for several processes on the same folder.

    A damaged, foreign or outdated file is a miss: it is moved to ``kv_dir/quarantine``, its row is dropped
    and a ``FusedKVWarning`` says so. It is never a wrong tensor and never a crash.

    Parameters
    ----------
    kv_dir : str or Path
        The folder, created (with mode 0700) if it does not exist. On a local POSIX disk.
    memory_bytes : int or str
        Most bytes of keys and values kept in memory, such as ``"4GB"``; 0 keeps none. Sidecars that were read get
        half as much again.
    disk_bytes : int, str or None
        Most bytes of chunk files and sidecars on the disk; when they are used up, the chunks that `policy` values
        least make room. None: as many as the disk holds. Files being written come on top, one a writing thread.
    policy : str
        Which chunks go first, in memory and on the disk: a key of ``policies.POLICIES``.
    kv_dtype : str
        Dtype in which keys and values are stored: ``"auto"`` keeps theirs; see ``quantize.STORAGE_DTYPES``.
    encryption_key : str, bytes or None
        Encrypts everything that is written; 32 bytes, 64 hexadecimal digits or base64. None takes the
        environment's ``FUSED_KV_ENCRYPTION_KEY``, if there is one. It is stored nowhere.
    remote : str or None
        URL of a remote tier, see ``remote.open_remote``. Evicted chunks go there, and come back when they are
        needed; chunks that other machines have put there are found when the store is opened.
    remote_options : dict or None
        Further arguments of the remote tier's backend.
    read_only : bool
        Change nothing in the folder.

    Attributes
    ----------
    sidecars : Sidecars
        Small tensors beside the chunks, read without their KV.
    archive : Archive
        Chunks in one file, for another machine.

    Raises
    ------
    ConfigError
        An option cannot work.
    StoreUnavailableError
        The folder or the remote tier cannot be used, the index is damaged, or the encryption key is another one.
    """

    # -- writing ---------------------------------------------------------------------------------------------

    def put(
        self, key: str, identity: str, text: str, content: ContentHash, kv: ChunkKV, *, cost: float | None = None
    ) -> int:
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
        cost : float or None
            Seconds that computing it took, for the policy; None stands for its number of tokens. The chunks of
            one store should all have the one or the other.

        Returns
        -------
        int
            Bytes written; 0 if the chunk was there already.

        Raises
        ------
        ConfigError
            The key, text, hashes or KV cannot be stored.
        StoreFullError
            The disk is full, or the budget too small; the store is as it was.
        StoreUnavailableError
            The store is closed, read-only or cannot be written; it is as it was.
        """
        self._check_writable()
        check_key(key)
        with self._writer.lock(key):
            if self._writer.is_stored(key):
                return 0
            parts = encode_chunk(key, identity, text, content, kv, self.kv_dtype, self._cipher)
            nbytes = sum(len(part) for part in parts)
            row = ChunkRow(key, identity, text, tuple(kv.token_ids), kv.position, nbytes)
            return nbytes if self._writer.write(row, content, parts, cost or float(len(kv.token_ids))) else 0

    # -- looking up ------------------------------------------------------------------------------------------

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

    def rows_by_rowid(self, rowids: Iterable[int]) -> dict[int, ChunkRow]:
        """Return what the index knows about those of ``rowids`` (see `content_hashes`) that are stored."""
        self._check_open()
        rows, damaged = self._index.rows_by_rowid(rowids)
        for key in damaged:
            self.discard(key, "its row in the index cannot be understood")
        return {rowid: row for rowid, row in rows.items() if row.key not in self._damage.ignored}

    def content_hashes(self, identity: str, after_rowid: int = 0) -> Iterator[ContentRows]:
        """Yield content hashes of an identity's chunks that were added after a ``rowid``, part by part, ascending.

        Parameters
        ----------
        identity : str
            ``KVIdentity.digest``.
        after_rowid : int
            The last ``rowid`` seen; 0 for all. A chunk that is stored anew gets a new one, and none is used twice.

        Yields
        ------
        ContentRows
            Arrays ``rowid, prefix, full, length``.
        """
        self._check_open()
        while (found := self._index.content_hashes(identity, after_rowid)) is not None:
            yield found
            after_rowid = int(found.rowid[-1])

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
        stored = None if key in self._damage.ignored else self._open(key, tuple(token_ids))
        if stored is None:
            self._uses.add(misses=1)
        elif self._uses.hit(key, stored.tier) and not self._read_only:
            self._prefetcher.run(self._flush_uses)
        return stored

    def _open(self, key: str, token_ids: tuple[int, ...]) -> StoredKV | None:
        source: ResidentChunk | ChunkLoader | None = self._reader.acquire_known(key)
        fetched = False
        if source is None:
            place = self._index.ledger.place(key)
            if place is None:
                # Another process may have deleted it, and this one's memory must not serve it any more.
                self._reader.forget(key)
                return None
            fetched = not place.on_disk and key not in self._memory and key in self.fetch([key])
            source = self._acquire(key)
        if source is None:
            return None
        if source.header.token_ids != token_ids:
            source.release()
            self.discard(key, f"its {source.header.num_tokens} token ids are not those expected")
            return None
        if not isinstance(source, ChunkLoader):
            return StoredKV("memory", source)
        return StoredKV("remote" if fetched else "disk", source)

    def _acquire(self, key: str) -> ResidentChunk | ChunkLoader | None:
        try:
            return self._reader.acquire(key)
        except FileNotFoundError:
            if self._damage.vanished(key):
                self._uses.add(damaged=1)
        except ChunkDamagedError as error:
            self.discard(key, error.reason)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                self.discard(key, "it is not a regular file")
            else:
                warn(f"The stored KV of chunk {key} cannot be read now ({error}). It is computed afresh.")
        return None

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
        self._uses.add(damaged=1)
        return self._damage.discard(check_key(key), reason)

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start loading chunks into the memory tier and return at once.

        Stops at the memory tier's budget. Chunks that are missing or damaged are left for ``open`` to report.
        """
        self._check_open()
        wanted = [check_key(key) for key in keys if key not in self._damage.ignored]
        self._prefetcher.submit(wanted, self.fetch)

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
