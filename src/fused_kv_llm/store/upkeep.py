"""Keeping a store in order: deleting, evicting, auditing, counting."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from fused_kv_llm.config import parse_bytes
from fused_kv_llm.errors import ConfigError, StoreFullError
from fused_kv_llm.store.audit import CheckReport, Progress, check_store
from fused_kv_llm.store.folder import free_bytes
from fused_kv_llm.store.format import check_key
from fused_kv_llm.store.parts import StoreParts
from fused_kv_llm.store.stats import StoreStats
from fused_kv_llm.store.uses import StoreCounters

__all__ = ["StoreUpkeep"]

_HOTTEST = 10


class StoreUpkeep(StoreParts):
    """What operators do with a store; ``KVStore`` is one."""

    def delete(self, keys: Iterable[str]) -> int:
        """Delete chunks from every tier; returns how many were stored."""
        self._check_writable()
        wanted = [check_key(key) for key in keys]
        if self._promoter is not None:
            self._promoter.forget(wanted)
        with self._index.transaction():
            sidecars = {key: self._index.ledger.sidecars(key) for key in wanted}
            deleted = self._index.remove(wanted)
            deleted.update(key for key in wanted if self._folder.remove(key))
            for key, names in sidecars.items():
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

    def check(
        self, *, fix: bool = False, take_other_keys: bool = False, progress: Progress | None = None
    ) -> CheckReport:
        """Read every file and compare it with its row.

        Parameters
        ----------
        fix : bool
            Mend what was found: give whole files without a row their row, correct rows, drop rows without a
            file, move what is damaged to quarantine.
        take_other_keys : bool
            Also move files to quarantine that were not written with this store's encryption key, or without one. They
            are whole, so mending leaves them where they are; a chunk that is stored again takes their place.
        progress : callable or None
            Called with the number of files done and their number.

        Returns
        -------
        CheckReport

        Raises
        ------
        ConfigError
            `take_other_keys` without `fix`.
        StoreUnavailableError
            To mend: the store is read-only, or none of its files was written with its key. Nothing was changed.
        """
        if take_other_keys and not fix:
            raise ConfigError("take_other_keys moves files: give fix=True (--fix) too.")
        if fix:
            self._check_writable()
        else:
            self._check_open()
        return check_store(
            self._folder, self._index, self._cipher, fix=fix, take_other_keys=take_other_keys, progress=progress
        )

    def collect_garbage(self) -> tuple[int, int]:
        """Delete quarantined files and what dead writers left, compact the index; returns files and bytes freed."""
        self._check_writable()
        swept = self._folder.staging.sweep()
        files, nbytes = self._folder.kept.empty()
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
            sidecars=self._index.ledger.sidecar_tiers(),
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
        free, limit = max(0, free_bytes(self._folder.root) - spare_bytes), self._budget.limit_nbytes
        return min(free, limit) if limit is not None and self._promoter is None else free
