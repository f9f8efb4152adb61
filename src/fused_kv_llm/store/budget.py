"""The disk budget: evicting chunks to make room for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fused_kv_llm.errors import StoreFullError
from fused_kv_llm.store.folder import StoreFolder
from fused_kv_llm.store.index import ChunkIndex, Place, Victim
from fused_kv_llm.store.uses import UseLog

__all__ = ["DiskBudget"]

_AT_ONCE = 64


class DiskBudget:
    """Keeps the files of a store within a number of bytes.

    Parameters
    ----------
    limit_nbytes : int or None
        Most bytes of chunk files and sidecars; None for as many as the disk holds.
    folder, index, uses : StoreFolder, ChunkIndex, UseLog
        The store's.
    demote : callable
        Copies a chunk's files to the remote tier, outside all locks; False if there is no remote tier.
    """

    def __init__(
        self,
        limit_nbytes: int | None,
        folder: StoreFolder,
        index: ChunkIndex,
        uses: UseLog,
        demote: Callable[[str], bool],
    ) -> None:
        self.limit_nbytes = limit_nbytes
        self._folder = folder
        self._index = index
        self._uses = uses
        self._demote = demote

    def fits(self, nbytes: int) -> bool:
        """Whether the budget has room for so many more bytes."""
        return self.limit_nbytes is None or self._index.ledger.total("disk_nbytes") + nbytes <= self.limit_nbytes

    def make_room(self, nbytes: int) -> None:
        """Evict chunks until the budget has room for so many more bytes.

        Raises
        ------
        StoreFullError
            The budget is smaller, or every chunk that could go is pinned or being read.
        """
        if self.limit_nbytes is None:
            return
        if nbytes > self.limit_nbytes:
            raise StoreFullError(
                f"A chunk takes {nbytes / 1e6:.1f} MB on the disk, the budget disk_bytes is "
                f"{self.limit_nbytes / 1e6:.1f} MB. Raise it, or make chunks smaller."
            )
        self.shrink_to(self.limit_nbytes - nbytes)

    def shrink_to(self, limit_nbytes: int) -> int:
        """Evict chunks until the files take at most so many bytes; returns how many chunks went.

        Raises
        ------
        StoreFullError
            The chunks that remain are pinned or being read.
        """
        self.flush_uses()
        held: set[str] = set()
        evicted = 0
        while (excess := self._index.ledger.total("disk_nbytes") - limit_nbytes) > 0:
            victims = [v for v in self._index.ledger.victims(_AT_ONCE + len(held)) if v.key not in held]
            if not victims:
                raise StoreFullError(
                    f"The chunks that are left in {self._folder.root} cannot make room: {len(held)} are being read, "
                    "the others are pinned. Unpin some, try again, or raise disk_bytes."
                )
            chosen = []
            for victim in victims:
                if excess <= 0:
                    break
                chosen.append(victim)
                excess -= victim.nbytes
            gone = self._evict(chosen)
            evicted += len(gone)
            held |= {victim.key for victim in chosen} - gone
        return evicted

    def flush_uses(self) -> None:
        """Write the uses of chunks to the index."""
        uses, counts = self._uses.take()
        if uses or counts:
            with self._index.transaction():
                self._index.ledger.count(uses)
                self._index.ledger.add_counts(counts)

    def _evict(self, victims: Sequence[Victim]) -> set[str]:
        """Evict those of these chunks that nobody is reading; returns their keys."""
        sidecars = {victim.key: self._index.ledger.sidecars(victim.key) for victim in victims}
        kept = {victim.key: victim.on_remote or self._demote(victim.key) for victim in victims}
        gone: set[str] = set()
        with self._index.transaction():
            for victim in victims:
                place = self._index.ledger.place(victim.key)
                if place is None or not place.on_disk:
                    # Another process has evicted or deleted it.
                    gone.add(victim.key)
                    continue
                if self._index.ledger.sidecars(victim.key) != sidecars[victim.key]:
                    # It got another sidecar after it was copied to the remote tier.
                    continue
                if not self._folder.evict(victim.key):
                    continue
                for name in sidecars[victim.key]:
                    self._folder.remove(victim.key, name)
                # Read again: another process may have copied the chunk to the remote tier meanwhile.
                if kept[victim.key] or place.on_remote:
                    self._index.ledger.move(victim.key, Place(on_disk=False, on_remote=True), victim.nbytes)
                else:
                    self._index.remove([victim.key], "evicted")
                self._index.ledger.advance_clock(victim.priority)
                gone.add(victim.key)
        self._uses.add(evicted_disk=len(gone))
        return gone
