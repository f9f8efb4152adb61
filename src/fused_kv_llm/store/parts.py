"""What a store is made of, opened together and closed together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fused_kv_llm.config import parse_bytes
from fused_kv_llm.errors import StoreError, StoreUnavailableError
from fused_kv_llm.store.budget import DiskBudget
from fused_kv_llm.store.damage import DamageControl, warn
from fused_kv_llm.store.folder import StoreFolder, check_files_key
from fused_kv_llm.store.format import FileCodec, check_key, open_cipher
from fused_kv_llm.store.index import ChunkIndex, resolve_policy
from fused_kv_llm.store.promotion import Promoter, demote
from fused_kv_llm.store.read import FileReader, MemoryTier, Prefetcher
from fused_kv_llm.store.refresh import Refresher, RefreshReport
from fused_kv_llm.store.refreshing import Refreshing
from fused_kv_llm.store.remote import RemoteTier, open_remote
from fused_kv_llm.store.uses import UseLog
from fused_kv_llm.store.writer import ChunkWriter

__all__ = ["StoreParts"]


class StoreParts:
    """The parts of one store, shared by those who work on them.

    Parameters
    ----------
    kv_dir, memory_bytes, disk_bytes, policy, encryption_key, remote, remote_options, learn, refresh_s, read_only
        As ``KVStore`` takes them.

    Attributes
    ----------
    folder, index, codec, uses : StoreFolder, ChunkIndex, FileCodec, UseLog
        Where the files are, which chunks there are, what files contain, how chunks are used.
    memory, reader, prefetcher : MemoryTier, FileReader, Prefetcher
        How files are read.
    budget, writer, damage : DiskBudget, ChunkWriter, DamageControl
        How files are written, and taken out again.
    tier : RemoteTier or None
    promoter : Promoter or None
        The way from the remote tier, if there is one and the store may be written.
    """

    def __init__(
        self,
        kv_dir: Path,
        *,
        memory_bytes: int | str,
        disk_bytes: int | str | None,
        policy: str,
        encryption_key: str | bytes | None,
        remote: str | None,
        remote_options: dict[str, Any] | None,
        learn: bool,
        refresh_s: float | None,
        read_only: bool,
    ) -> None:
        memory_budget = parse_bytes(memory_bytes, "memory_bytes")
        disk_budget = None if disk_bytes is None else parse_bytes(disk_bytes, "disk_bytes")
        rule, cipher = resolve_policy(policy), open_cipher(encryption_key)
        self.read_only, self.closed = read_only, False
        self._refreshing: Refreshing | None = None
        self.codec, self.uses = FileCodec(cipher), UseLog()
        self.folder = StoreFolder(kv_dir, read_only=read_only)
        if not read_only and not _has_index(self.folder.index_path):
            # A new index is bound to the key for good.
            check_files_key(self.folder, self.codec)
        self.index = ChunkIndex(self.folder.index_path, rule, cipher, read_only=read_only)
        self.tier: RemoteTier | None = None
        try:
            self.tier = None if remote is None else open_remote(remote, remote_options)
            self.budget = DiskBudget(
                disk_budget, self.folder, self.index, self.uses,
                partial(demote, self.tier, self.folder, self.index, self.uses),
            )  # fmt: skip
            self.memory = MemoryTier(memory_budget, rule)
            self.reader = FileReader(self.folder, self.memory, self.codec)
            self.prefetcher = Prefetcher(self.reader, memory_budget)
            self.damage = DamageControl(self.folder, self.index, self.reader, self.uses, read_only=read_only)
            self.writer = ChunkWriter(self.folder, self.index, self.budget, self.uses, self.damage.ignored)
            self.promoter: Promoter | None = None
            if self.tier is not None and not read_only:
                self.promoter = Promoter(self.tier, self.folder, self.index, self.writer, self.uses, self.codec)
                if learn:
                    self.refresh()
                if refresh_s is not None:
                    self._refreshing = Refreshing(self.refresh, refresh_s)
        except BaseException:
            self._disconnect()
            raise

    def check_open(self) -> None:
        """Raise StoreUnavailableError if the store was closed."""
        if self.closed:
            raise StoreUnavailableError(f"The store in {self.folder.root} was closed. Open a new KVStore.")

    def check_writable(self) -> None:
        """Raise StoreUnavailableError if the store was closed, or opened read-only."""
        self.check_open()
        if self.read_only:
            raise StoreUnavailableError(
                f"The store in {self.folder.root} was opened with read_only=True. Open it without, to change it."
            )

    def refresh(self) -> RefreshReport:
        """Learn what other machines have changed on the remote tier, which there has to be."""
        tier = self.promoter_of().remote
        return Refresher(tier, self.folder, self.index, self.reader, self.uses, self.codec).refresh()

    def promoter_of(self) -> Promoter:
        """Return the way from the remote tier; raises StoreUnavailableError if there is none."""
        if self.promoter is None:
            raise StoreUnavailableError(f"The store in {self.folder.root} has no remote tier, or is read-only.")
        return self.promoter

    def fetch(self, keys: Sequence[str]) -> set[str]:
        """Bring chunks from the remote tier to the disk; see ``KVStore.fetch``."""
        self.check_open()
        if self.promoter is None:
            return set()
        try:
            return self.promoter.fetch([check_key(key) for key in keys])
        except StoreError as error:
            warn(f"Chunks could not be brought from the remote tier and are computed afresh: {error}")
            return set()

    def close(self) -> None:
        """Close everything; see ``KVStore.close``."""
        if self.closed:
            return
        self.closed = True
        if self._refreshing is not None:
            self._refreshing.close()
        self.prefetcher.close()
        if not self.read_only:
            # Only a few uses can be lost here.
            with suppress(StoreError):
                self.budget.flush_uses()
        self.reader.forget_all()
        self._disconnect()

    def _disconnect(self) -> None:
        try:
            if self.tier is not None:
                self.tier.close()
        finally:
            self.index.close()


def _has_index(path: Path) -> bool:
    # An index that was only begun has no bytes yet.
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
