"""``KVStore``: the chunk KV of a corpus in memory, on disk and on a remote tier, behind one face."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from fused_kv_llm.chunk import ChunkKV, ContentHash
from fused_kv_llm.config import parse_bytes
from fused_kv_llm.errors import ChunkDamagedError, StoreError, StoreFullError, StoreUnavailableError
from fused_kv_llm.store.archive import Archive
from fused_kv_llm.store.budget import DiskBudget
from fused_kv_llm.store.check import CheckReport, Progress, check_store
from fused_kv_llm.store.cipher import Cipher, find_key
from fused_kv_llm.store.damage import DamageControl, warn
from fused_kv_llm.store.file_format import encode_chunk
from fused_kv_llm.store.index import ChunkIndex, ChunkRow, ContentRows
from fused_kv_llm.store.layout import StoreFolder, check_key
from fused_kv_llm.store.loader import ChunkLoader
from fused_kv_llm.store.memory import MemoryTier, ResidentChunk
from fused_kv_llm.store.policies import DEFAULT_POLICY, resolve_policy
from fused_kv_llm.store.prefetch import Prefetcher
from fused_kv_llm.store.promotion import Promoter, demote
from fused_kv_llm.store.quantize import check_kv_dtype
from fused_kv_llm.store.reader import ChunkReader
from fused_kv_llm.store.remote import RemoteTier, open_remote
from fused_kv_llm.store.side_memory import SideMemory
from fused_kv_llm.store.sides import SideFiles
from fused_kv_llm.store.stats import StoreStats
from fused_kv_llm.store.stored_kv import StoredKV
from fused_kv_llm.store.uses import StoreCounters, UseLog
from fused_kv_llm.store.writer import ChunkWriter

__all__ = ["KVStore"]

_GIB = 1 << 30
_HOTTEST = 10
# Side files get this part of the memory budget on top of it: an eight-bit shift is half as large as its chunk's KV.
_SIDE_SHARE = 2


class KVStore:
    """Chunk KV in a folder; thread-safe, and safe for several processes on the same folder.

    A damaged, foreign or outdated file is a miss: it is moved to ``kv_dir/quarantine``, its row is dropped
    and a ``FusedKVWarning`` says so. It is never a wrong tensor and never a crash.

    Parameters
    ----------
    kv_dir : str or Path
        The folder, created (with mode 0700) if it does not exist. On a local POSIX disk.
    memory_bytes : int or str
        Most bytes of keys and values kept in memory, such as ``"4GB"``; 0 keeps none. Side files that were read get
        half as much again.
    disk_bytes : int, str or None
        Most bytes of chunk and side files on the disk; when they are used up, the chunks that `policy` values
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
    sides : SideFiles
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

    def __init__(
        self,
        kv_dir: str | Path,
        *,
        memory_bytes: int | str = 2 * _GIB,
        disk_bytes: int | str | None = None,
        policy: str = DEFAULT_POLICY,
        kv_dtype: str = "auto",
        encryption_key: str | bytes | None = None,
        remote: str | None = None,
        remote_options: dict[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        self.kv_dir = Path(kv_dir).expanduser()
        self.kv_dtype = check_kv_dtype(kv_dtype)
        self._read_only = read_only
        self._closed = False
        budget = parse_bytes(memory_bytes, "memory_bytes")
        limit = None if disk_bytes is None else parse_bytes(disk_bytes, "disk_bytes")
        rule, key = resolve_policy(policy), find_key(encryption_key)
        self._cipher = None if key is None else Cipher(key)
        self._memory = MemoryTier(budget, rule)
        self._uses = UseLog()
        self._folder = StoreFolder(self.kv_dir, read_only=read_only)
        self._index = ChunkIndex(self._folder.index_path, rule, self._cipher, read_only=read_only)
        try:
            tier = None if remote is None else open_remote(remote, remote_options)
            self._assemble(limit, tier, budget)
        except BaseException:
            self._index.close()
            raise

    def _assemble(self, limit: int | None, tier: RemoteTier | None, memory_budget: int) -> None:
        folder, index, uses, cipher = self._folder, self._index, self._uses, self._cipher
        self._budget = DiskBudget(limit, folder, index, uses, partial(demote, tier, folder, index, uses))
        ignored: set[str] = set()
        self._writer = ChunkWriter(folder, index, self._budget, uses, ignored)
        self._promoter = None
        if tier is not None and not self._read_only:
            self._promoter = Promoter(tier, folder, index, self._writer, uses, cipher)
            self._promoter.learn()
        self._reader = ChunkReader(folder, self._memory, cipher)
        self._prefetcher = Prefetcher(self._reader, memory_budget)
        self._damage = DamageControl(folder, index, self._reader, ignored, read_only=self._read_only)
        self._side_memory = SideMemory(memory_budget // _SIDE_SHARE)
        self.sides = SideFiles(
            folder, index, self._writer, self._damage, cipher, self.fetch, self._check_writable, self._side_memory
        )
        self.archive = Archive(folder, index, self._writer, cipher, self.fetch, self._check_writable)

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

    def fetch(self, keys: Sequence[str]) -> set[str]:
        """Bring chunks from the remote tier to the disk, all in one call.

        Parameters
        ----------
        keys : sequence of str
            Those that are on the disk already, or nowhere, do not matter.

        Returns
        -------
        set of str
            The keys of the chunks that were brought. If the remote tier or the disk cannot be used, there are
            none, and a ``FusedKVWarning`` says why.
        """
        self._check_open()
        if self._promoter is None:
            return set()
        try:
            return self._promoter.fetch([check_key(key) for key in keys])
        except StoreError as error:
            warn(f"Chunks could not be brought from the remote tier and are computed afresh: {error}")
            return set()

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

    # -- upkeep ----------------------------------------------------------------------------------------------

    def delete(self, keys: Iterable[str]) -> int:
        """Delete chunks from every tier; returns how many were stored."""
        self._check_writable()
        wanted = [check_key(key) for key in keys]
        if self._promoter is not None:
            self._promoter.forget(wanted)
        with self._index.transaction():
            sides = {key: self._index.ledger.sides(key) for key in wanted}
            deleted = self._index.remove(wanted)
            deleted.update(key for key in wanted if self._folder.remove(key))
            for key, names in sides.items():
                for name in names:
                    self._folder.remove(key, name)
        for key in wanted:
            self._reader.forget(key)
        return len(deleted)

    def evict(self, disk_bytes: int | str) -> int:
        """Evict the chunks of least value until the files take at most so many bytes; returns how many went.

        Raises
        ------
        StoreFullError
            The chunks that remain are being read.
        """
        self._check_writable()
        return self._budget.shrink_to(parse_bytes(disk_bytes, "disk_bytes"))

    def check(self, *, fix: bool = False, progress: Progress | None = None) -> CheckReport:
        """Read every file and compare it with its row.

        Parameters
        ----------
        fix : bool
            Mend what was found: give whole files without a row their row, correct rows, drop rows without a
            file, move what cannot be used to quarantine.
        progress : callable or None
            Called with the number of files done and their number.

        Returns
        -------
        CheckReport
        """
        if fix:
            self._check_writable()
        else:
            self._check_open()
        return check_store(self._folder, self._index, self._cipher, fix=fix, progress=progress)

    def collect_garbage(self) -> tuple[int, int]:
        """Delete quarantined files and what dead writers left, compact the index; returns files and bytes freed."""
        self._check_writable()
        swept = self._folder.sweep_temp()
        files, nbytes = self._folder.empty_quarantine()
        self._index.compact()
        return swept + files, nbytes

    def describe(self, identity: str, name: str) -> None:
        """Say what people call an identity: ``stats()`` shows it. In a read-only store it does nothing.

        Parameters
        ----------
        identity : str
            ``KVIdentity.digest``.
        name : str
            Its model, dtype and preprocessing. It is not encrypted.
        """
        self._check_open()
        if not self._read_only:
            # Without room for the name the store can still be read.
            with suppress(StoreFullError):
                self._index.ledger.describe(identity, name)

    def drop_memory(self) -> None:
        """Empty the memory tier, so that every chunk is read from the disk again."""
        self._reader.forget_all()
        self._side_memory.forget_all()

    def stats(self) -> StoreStats:
        """Return what the store holds."""
        self._check_open()
        if not self._read_only:
            self._flush_uses()
        totals = self._index.totals()
        memory_chunks, memory_bytes = self._memory.usage()
        return StoreStats(
            chunks=sum(row.chunks for row in totals),
            tokens=sum(row.tokens for row in totals),
            bytes_on_disk=sum(row.nbytes for row in totals),
            memory_chunks=memory_chunks,
            memory_bytes=memory_bytes,
            by_identity={row.identity: row.chunks for row in totals},
            tiers=self._index.ledger.tiers(),
            disk_bytes=self._budget.limit_nbytes,
            hottest=self._index.ledger.hottest(_HOTTEST),
            identities=totals,
            lifetime=StoreCounters.from_counts(self._index.ledger.counts()),
        )

    def counters(self) -> StoreCounters:
        """Return what this process has done with the store."""
        counters = self._uses.counters()
        counters.evicted_memory = self._memory.evictions
        return counters

    def free_bytes(self, spare_bytes: int = 0) -> int:
        """Return how many bytes of new chunks the store can hold.

        What the disk has left beyond some spare bytes. A disk budget limits it, except where evicted chunks go to a
        remote tier.

        Raises
        ------
        StoreUnavailableError
            The disk does not say.
        """
        free, limit = max(0, self._folder.free_bytes() - spare_bytes), self._budget.limit_nbytes
        return min(free, limit) if limit is not None and self._promoter is None else free

    def close(self) -> None:
        """Stop prefetching, wait for its thread, close the index and empty the memory tier.

        Chunks that are open stay readable. Closing twice is harmless.
        """
        if self._closed:
            return
        self._closed = True
        self._prefetcher.close()
        if not self._read_only:
            # What is lost otherwise is a few uses.
            with suppress(StoreError):
                self._flush_uses()
        if self._promoter is not None:
            self._promoter.remote.close()
        self._index.close()
        self._reader.forget_all()
        self._side_memory.forget_all()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush_uses(self) -> None:
        self._budget.flush_uses()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError(f"The store in {self.kv_dir} was closed. Open a new KVStore.")

    def _check_writable(self) -> None:
        self._check_open()
        if self._read_only:
            raise StoreUnavailableError(
                f"The store in {self.kv_dir} was opened with read_only=True. Open it without, to change it."
            )
