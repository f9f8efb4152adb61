"""``KVStore``: the chunk KV of a corpus in memory, on disk and on a remote tier, behind one face."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fused_kv_llm.chunk import ChunkKV, ContentHash
from fused_kv_llm.config import DEFAULT_MEMORY, DEFAULT_POLICY
from fused_kv_llm.store.archive import Archive
from fused_kv_llm.store.audit import CheckReport, Progress
from fused_kv_llm.store.format import check_key, check_kv_dtype, check_name
from fused_kv_llm.store.index import ChunkRow, ContentRows
from fused_kv_llm.store.namespaces import Namespaces
from fused_kv_llm.store.opening import open_chunk
from fused_kv_llm.store.parts import StoreParts
from fused_kv_llm.store.pins import StorePins
from fused_kv_llm.store.read import BlockReader, StoredKV
from fused_kv_llm.store.references import References
from fused_kv_llm.store.shared import SharedTier
from fused_kv_llm.store.sidecars import Sidecars
from fused_kv_llm.store.stats import ChunkStanding, StoreStats
from fused_kv_llm.store.upkeep import StoreUpkeep
from fused_kv_llm.store.uses import StoreCounters

__all__ = ["KVStore"]


class KVStore:
    """Chunk KV in a folder; thread-safe, and safe for several processes on the same folder.

    A damaged, foreign or outdated file is a miss: it is moved to ``kv_dir/quarantine``, its row is dropped, and a
    ``FusedKVWarning`` says so. It is never a wrong tensor and never a crash.

    Parameters
    ----------
    kv_dir : str or Path
        The folder, created (with mode 0700) if it does not exist. It belongs on a local POSIX disk.
    memory_bytes : int or str
        Most bytes of tensors kept in memory, of chunks and sidecars together, such as ``"4GB"``; 0 keeps none.
    disk_bytes : int, str or None
        Most bytes of chunk files and sidecars on the disk; when they are used up, the chunks that `policy` values least
        make room. None: as many as the disk holds. Files being written come on top, one for each writing thread.
    policy : str
        What goes first, in memory and on the disk: a key of ``POLICIES``.
    kv_dtype : str
        Dtype in which keys and values are stored, one of ``STORAGE_DTYPES``; ``"auto"`` keeps theirs.
    encryption_key : str, bytes or None
        Encrypts everything that is written; 32 bytes, 64 hexadecimal digits or base64. None takes the environment's
        ``FUSED_KV_ENCRYPTION_KEY``, if there is one. The key is stored nowhere.
    remote : str or None
        URL of a remote tier, see ``open_remote``. Evicted chunks go there, and come back when they are needed; chunks
        that other machines have put there are found when the store is opened.
    remote_options : dict or None
        Further arguments of the remote tier's backend.
    learn : bool
        Whether to learn at once what other machines have changed there, see :meth:`SharedTier.refresh`.
    refresh_s : float or None
        Seconds after which a thread looks again for such changes; None never does.
    read_only : bool
        Change nothing in the folder.

    Attributes
    ----------
    sidecars : Sidecars
        Small tensors beside the chunks, read without their KV.
    archive : Archive
        Chunks in one file, for another machine.
    references : References
        What models computed when their first chunks were stored.
    shared : SharedTier
        The remote tier as a store that other machines write to as well.
    namespaces : Namespaces
        For which models, dtypes and templates there are chunks.
    pins : StorePins
        Who keeps which chunks from being evicted.

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
        memory_bytes: int | str = DEFAULT_MEMORY,
        disk_bytes: int | str | None = None,
        policy: str = DEFAULT_POLICY,
        kv_dtype: str = "auto",
        encryption_key: str | bytes | None = None,
        remote: str | None = None,
        remote_options: dict[str, Any] | None = None,
        learn: bool = True,
        refresh_s: float | None = None,
        read_only: bool = False,
    ) -> None:
        self.kv_dir = Path(kv_dir).expanduser()
        self.kv_dtype = check_kv_dtype(kv_dtype)
        self._parts = StoreParts(
            self.kv_dir,
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            policy=policy,
            encryption_key=encryption_key,
            remote=remote,
            remote_options=remote_options,
            learn=learn,
            refresh_s=refresh_s,
            read_only=read_only,
        )
        self._upkeep = StoreUpkeep(self._parts)
        self.sidecars = Sidecars(self._parts)
        self.archive = Archive(self._parts)
        self.references = References(self._parts)
        self.namespaces = Namespaces(self._parts)
        self.pins = StorePins(self._parts)
        self.shared = SharedTier(self._parts)

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
            Seconds that computing it took, for the policy; None uses its number of tokens. Use the same kind for all
            chunks of a store.

        Returns
        -------
        int
            Bytes written; 0 if the chunk was already stored.

        Raises
        ------
        ConfigError
            The key, text, hashes or KV cannot be stored.
        StoreFullError
            The disk is full, or the budget too small. The store is unchanged.
        StoreUnavailableError
            The store is closed, read-only or cannot be written. It is unchanged.
        """
        self._parts.check_writable()
        check_key(key)
        with self._parts.writer.lock(key):
            if self._parts.writer.is_stored(key):
                return 0
            parts = self._parts.codec.encode_chunk(key, identity, text, content, kv, self.kv_dtype)
            nbytes = sum(len(part) for part in parts)
            row = ChunkRow(key, identity, text, tuple(kv.token_ids), kv.position, nbytes)
            return nbytes if self._parts.writer.write(row, content, parts, cost or float(len(kv.token_ids))) else 0

    # -- looking up ------------------------------------------------------------------------------------------

    def contains(self, keys: Iterable[str]) -> set[str]:
        """Return those of ``keys`` that are stored."""
        self._parts.check_open()
        return self._parts.index.present(check_key(key) for key in keys) - self._parts.damage.ignored

    def rows(self, keys: Iterable[str]) -> dict[str, ChunkRow]:
        """Return what the index knows about those of ``keys`` that are stored."""
        self._parts.check_open()
        rows, damaged = self._parts.index.rows(check_key(key) for key in keys if key not in self._parts.damage.ignored)
        for key in damaged:
            self._parts.damage.discard(key, "its row in the index cannot be understood")
        return rows

    def rows_by_rowid(self, rowids: Iterable[int]) -> dict[int, ChunkRow]:
        """Return what the index knows about those of ``rowids`` (see `content_hashes`) that are stored."""
        self._parts.check_open()
        rows, damaged = self._parts.index.rows_by_rowid(rowids)
        for key in damaged:
            self._parts.damage.discard(key, "its row in the index cannot be understood")
        return {rowid: row for rowid, row in rows.items() if row.key not in self._parts.damage.ignored}

    def content_hashes(self, identity: str, after_rowid: int = 0) -> Iterator[ContentRows]:
        """Yield content hashes of an identity's chunks that were added after a ``rowid``, in ascending batches.

        Parameters
        ----------
        identity : str
            ``KVIdentity.digest``.
        after_rowid : int
            The last ``rowid`` seen; 0 for all. A chunk that is stored again gets a new one; none is used twice.

        Yields
        ------
        ContentRows
            Arrays ``rowid, prefix, full, length``.
        """
        self._parts.check_open()
        while (found := self._parts.index.content_hashes(identity, after_rowid)) is not None:
            yield found
            after_rowid = int(found.rowid[-1])

    def keys(self, identity: str, after_rowid: int = 0) -> list[str]:
        """Return the keys of an identity's chunks that were added after a ``rowid``, in the order of their rowids."""
        self._parts.check_open()
        return [key for key in self._parts.index.keys(identity, after_rowid) if key not in self._parts.damage.ignored]

    def keys_up_to(self, identity: str, key: str) -> list[str]:
        """Return those of an identity's keys that do not come after a certain one, ascending: a sample, as hashes go.

        It takes as long as there are keys up to that one, of all identities.
        """
        self._parts.check_open()
        found = self._parts.index.keys_up_to(identity, check_key(key))
        return [key for key in found if key not in self._parts.damage.ignored]

    def open(self, key: str, token_ids: Sequence[int], *, counted: bool = True, keeps: bool = True) -> StoredKV | None:
        """Open a chunk's KV for reading.

        Parameters
        ----------
        key : str
            The chunk.
        token_ids : sequence of int
            The chunk's stand-alone token ids. A stored chunk with other ids is not a hit.
        counted : bool
            Whether this is a use of the chunk, for the hit rate and the policy. Work beside requests is none.
        keeps : bool
            Whether what is read completely is kept in the memory tier. Work beside requests leaves that to them.

        Returns
        -------
        StoredKV or None
            None if the chunk is not stored, or not usable (with a ``FusedKVWarning``).
        """
        self._parts.check_open()
        check_key(key)
        stored = (
            None if key in self._parts.damage.ignored else open_chunk(self._parts, key, tuple(token_ids), keeps=keeps)
        )
        if not counted:
            return stored
        if stored is None:
            self._parts.uses.add(misses=1)
        elif self._parts.uses.hit(key, stored.tier) and not self._parts.read_only:
            self._parts.prefetcher.run(self._parts.budget.flush_uses)
        return stored

    def count_uses(self, tiers: Mapping[str, str], *, missed: int = 0) -> None:
        """Count uses of chunks that were opened without being counted, see :meth:`open`.

        Parameters
        ----------
        tiers : mapping of str to str
            By the chunks' keys, the tiers that they came from.
        missed : int
            Chunks that were wanted and not there.
        """
        self._parts.check_open()
        if missed:
            self._parts.uses.add(misses=missed)
        due = [self._parts.uses.hit(check_key(key), tier) for key, tier in tiers.items()]
        if any(due) and not self._parts.read_only:
            self._parts.prefetcher.run(self._parts.budget.flush_uses)

    def weigh_use(self, key: str, overhead: float, num_tokens: int) -> None:
        """Have a counted use weigh 1/CFO for the policy ``reuse`` (Cache-Craft section 3.3).

        Parameters
        ----------
        key : str
        overhead : float
            Cache fix overhead of the use. One below that of a single recomputed token counts as that of one.
        num_tokens : int
            Of the chunk.
        """
        least = 1.0 / max(1, num_tokens)
        self._parts.uses.weigh(key, 1.0 / min(1.0, max(overhead, least)) - 1.0)

    def discard(self, key: str, reason: str) -> bool:
        """Take a damaged chunk out of the store and warn about it.

        The file is moved to ``kv_dir/quarantine`` and the row is dropped. In a read-only store this process only stops
        using the chunk.

        Parameters
        ----------
        key, reason : str
            ``ChunkDamagedError.key`` and ``ChunkDamagedError.reason``.

        Returns
        -------
        bool
            Whether there was anything to take out. It warns only then.
        """
        self._parts.check_open()
        return self._parts.damage.discard(check_key(key), reason)

    def prefetch(self, keys: Iterable[str], sidecars: Iterable[str] = ()) -> None:
        """Start loading chunks into the memory tier and return at once.

        Stops at the memory tier's budget. Chunks that are missing or damaged are left for ``open`` to report.

        Parameters
        ----------
        keys : iterable of str
            The chunks.
        sidecars : iterable of str
            Names of sidecars to load with every chunk; a chunk need not have them.
        """
        self._parts.check_open()
        wanted = [check_key(key) for key in keys if key not in self._parts.damage.ignored]
        self._parts.prefetcher.submit(wanted, [check_name(name) for name in sidecars], self.fetch)

    def fetch(self, keys: Sequence[str]) -> set[str]:
        """Bring chunks from the remote tier to the disk, all in one call.

        Parameters
        ----------
        keys : sequence of str
            Chunks that are on the disk already, or not stored at all, are ignored.

        Returns
        -------
        set of str
            The keys of the chunks that were copied. If the remote tier or the disk cannot be used, there are none, and
            a ``FusedKVWarning`` says why.
        """
        return self._parts.fetch(keys)

    @property
    def is_encrypted(self) -> bool:
        """Whether texts and KV are encrypted on the disk."""
        return self._parts.codec.is_encrypted

    def departures(self, keys: Sequence[str]) -> dict[str, str]:
        """Return why chunks are not stored any more, by their keys: ``evicted``, ``deleted`` or ``damaged``.

        Only the newest few thousand of a store are known. A chunk that this process does not use any more, since it is
        damaged and cannot be moved away, counts as damaged.
        """
        self._parts.check_open()
        ignored = {key: "damaged" for key in keys if key in self._parts.damage.ignored}
        return self._parts.index.departures.of([check_key(key) for key in keys]) | ignored

    # -- upkeep, see ``StoreUpkeep`` -----------------------------------------------------------------------------

    def delete(self, keys: Iterable[str]) -> int:
        """Delete chunks from every tier; returns how many were stored."""
        return self._upkeep.delete(keys)

    def evict(self, disk_bytes: int | str) -> int:
        """Evict the chunks of least value until the files take at most so many bytes; returns how many went."""
        return self._upkeep.evict(disk_bytes)

    def check(
        self, *, fix: bool = False, take_other_keys: bool = False, progress: Progress | None = None
    ) -> CheckReport:
        """Read every file and compare it with its row; see ``StoreUpkeep.check``."""
        return self._upkeep.check(fix=fix, take_other_keys=take_other_keys, progress=progress)

    def collect_garbage(self) -> tuple[int, int]:
        """Delete quarantined files and leftovers of dead writers, compact the index; returns files and bytes freed."""
        return self._upkeep.collect_garbage()

    def describe(self, identity: str, name: str) -> None:
        """Give an identity a readable name, which ``stats()`` shows."""
        self._upkeep.describe(identity, name)

    def read_with(self, read_block: BlockReader) -> None:
        """Have files that are opened from now on read by something else than the system's cached reads.

        Parameters
        ----------
        read_block : BlockReader
            For example ``ThrottledReader``, which leaves a part of a shared disk to others. What it reads is verified
            as always.
        """
        self._parts.reader.read_block = read_block

    def wait_at_most(self, seconds: float | None) -> None:
        """Have a thread wait no longer for another one's read, in files that are opened from now on.

        Parameters
        ----------
        seconds : float or None
            After which ``ReadTimeoutError`` is raised; None for as long as it takes, which is the default.
        """
        self._parts.reader.patience_s = seconds

    def resident(self) -> dict[str, int]:
        """Return the bytes of the chunks that the memory tier holds, by their keys; this is no use of them."""
        return self._parts.memory.chunks()

    def drop_memory(self) -> None:
        """Empty the memory tier, so that every file is read from the disk again."""
        self._parts.reader.forget_all()

    def standings(self, keys: Iterable[str]) -> dict[str, ChunkStanding]:
        """Return where chunks are and how they were used; those that are not stored are left out."""
        return self._upkeep.standings([check_key(key) for key in keys])

    def stats(self) -> StoreStats:
        """Return what the store holds."""
        return self._upkeep.stats()

    def counters(self) -> StoreCounters:
        """Return what this process has done with the store."""
        return self._upkeep.counters()

    def free_bytes(self, spare_bytes: int = 0) -> int:
        """Return how many bytes of new chunks the store can hold, leaving spare bytes on the disk."""
        return self._upkeep.free_bytes(spare_bytes)

    def close(self) -> None:
        """Stop prefetching, wait for its thread, close the index and empty the memory tier.

        Chunks that are open stay readable. Closing twice is harmless.
        """
        self._parts.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
