"""Keeping a store in order: deleting, evicting, auditing, counting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from fused_kv_llm.config import parse_bytes
from fused_kv_llm.errors import ConfigError, StoreFullError
from fused_kv_llm.store.audit import CheckReport, Progress, check_store
from fused_kv_llm.store.folder import free_bytes
from fused_kv_llm.store.format import check_key, file_name
from fused_kv_llm.store.parts import StoreParts
from fused_kv_llm.store.stats import ChunkStanding, StoreStats
from fused_kv_llm.store.uses import StoreCounters

__all__ = ["StoreUpkeep"]

_HOTTEST = 10


class StoreUpkeep:
    """What operators do with a store; ``KVStore`` has methods of the same names.

    Parameters
    ----------
    parts : StoreParts
        The store's.
    """

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts

    def delete(self, keys: Iterable[str]) -> int:
        """Delete chunks from every tier; returns how many were stored."""
        self._parts.check_writable()
        wanted = [check_key(key) for key in keys]
        if self._parts.promoter is not None:
            self._parts.promoter.forget(wanted)
        with self._parts.index.transaction():
            sidecars = {key: self._parts.index.ledger.sidecars(key) for key in wanted}
            deleted = self._parts.index.remove(wanted, "deleted")
            deleted.update(key for key in wanted if self._parts.folder.remove(key))
            for key, names in sidecars.items():
                for name in names:
                    self._parts.folder.remove(key, name)
        for key, names in sidecars.items():
            self._parts.reader.forget(key, *names)
        return len(deleted)

    def evict(self, disk_bytes: int | str) -> int:
        """Evict the chunks of least value until the files take at most so many bytes; returns how many went.

        Raises
        ------
        StoreFullError
            The chunks that remain are pinned or being read.
        """
        self._parts.check_writable()
        return self._parts.budget.shrink_to(parse_bytes(disk_bytes, "disk_bytes"))

    def check(
        self, *, fix: bool = False, take_other_keys: bool = False, progress: Progress | None = None
    ) -> CheckReport:
        """Read every file and compare it with its row.

        Parameters
        ----------
        fix : bool
            Mend what was found: add missing rows of undamaged files, correct rows, drop rows without a file, move
            damaged files to quarantine.
        take_other_keys : bool
            Also move files to quarantine that were written with another encryption key, or without one. They are
            undamaged, so mending leaves them where they are until a chunk is stored again in their place.
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
            self._parts.check_writable()
        else:
            self._parts.check_open()
        return check_store(
            self._parts.folder,
            self._parts.index,
            self._parts.codec,
            fix=fix,
            take_other_keys=take_other_keys,
            progress=progress,
        )

    def collect_garbage(self) -> tuple[int, int]:
        """Delete quarantined files and leftovers of dead writers, compact the index; returns files and bytes freed."""
        self._parts.check_writable()
        swept = self._parts.folder.staging.sweep()
        files, nbytes = self._parts.folder.kept.empty()
        self._parts.index.compact()
        return swept + files, nbytes

    def describe(self, identity: str, name: str) -> None:
        """Give an identity a readable name, which ``stats()`` shows; does nothing in a read-only store.

        Parameters
        ----------
        identity : str
            ``KVIdentity.digest``.
        name : str
            Model, dtype and storage dtype. The name is not encrypted.
        """
        self._parts.check_open()
        if not self._parts.read_only:
            # A store without room for the name can still be read.
            with suppress(StoreFullError):
                self._parts.index.ledger.describe(identity, name)

    def stats(self) -> StoreStats:
        """Return what the store holds."""
        self._parts.check_open()
        if not self._parts.read_only:
            self._parts.budget.flush_uses()
        totals = self._parts.index.totals()
        memory_chunks, memory_bytes = self._parts.memory.usage()
        return StoreStats(
            chunks=sum(row.chunks for row in totals),
            tokens=sum(row.tokens for row in totals),
            bytes_on_disk=sum(row.nbytes for row in totals),
            memory_chunks=memory_chunks,
            memory_bytes=memory_bytes,
            by_identity={row.identity: row.chunks for row in totals},
            tiers=self._parts.index.ledger.tiers(),
            sidecars=self._parts.index.ledger.sidecar_tiers(),
            disk_bytes=self._parts.budget.limit_nbytes,
            hottest=self._parts.index.ledger.hottest(_HOTTEST),
            identities=totals,
            lifetime=StoreCounters.from_counts(self._parts.index.ledger.counts()),
        )

    def standings(self, keys: Sequence[str]) -> dict[str, ChunkStanding]:
        """Return where chunks are and how they were used; those that are not stored are left out."""
        self._parts.check_open()
        if not self._parts.read_only:
            self._parts.budget.flush_uses()
        found = self._parts.index.ledger.standings(keys)
        standings = {}
        for key, (on_disk, uses, used_s) in found.items():
            below = "disk" if on_disk else "remote"
            tier = "memory" if file_name(key) in self._parts.memory else below
            standings[key] = ChunkStanding(tier, uses, used_s)
        return standings

    def counters(self) -> StoreCounters:
        """Return what this process has done with the store."""
        counters = self._parts.uses.counters()
        counters.evicted_memory = self._parts.memory.evictions
        return counters

    def free_bytes(self, spare_bytes: int = 0) -> int:
        """Return how many bytes of new chunks the store can hold.

        This is the free space of the disk, less some spare bytes, and at most the disk budget unless evicted chunks go
        to a remote tier.

        Raises
        ------
        StoreUnavailableError
            The system cannot tell the free space.
        """
        free, limit = max(0, free_bytes(self._parts.folder.root) - spare_bytes), self._parts.budget.limit_nbytes
        return min(free, limit) if limit is not None and self._parts.promoter is None else free
