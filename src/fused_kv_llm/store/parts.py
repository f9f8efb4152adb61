"""What a store is made of, put together and taken apart again; what it does with it is in rooms of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fused_kv_llm.config import parse_bytes
from fused_kv_llm.errors import StoreError, StoreUnavailableError
from fused_kv_llm.store.archive import Archive
from fused_kv_llm.store.budget import DiskBudget
from fused_kv_llm.store.damage import DamageControl, warn
from fused_kv_llm.store.folder import StoreFolder, check_files_key
from fused_kv_llm.store.format import Cipher, check_key, check_kv_dtype, find_key
from fused_kv_llm.store.index import DEFAULT_POLICY, ChunkIndex, resolve_policy
from fused_kv_llm.store.promotion import Promoter, demote
from fused_kv_llm.store.read import ChunkReader, MemoryTier, Prefetcher, SideMemory
from fused_kv_llm.store.remote import RemoteTier, open_remote
from fused_kv_llm.store.sidecars import Sidecars
from fused_kv_llm.store.uses import UseLog
from fused_kv_llm.store.writer import ChunkWriter

__all__ = ["StoreParts"]

# Sidecars get this part of the memory budget on top of it: an eight-bit shift is half as large as its chunk's KV.
_SIDE_SHARE = 2


class StoreParts:
    """The folder, the index, the tiers and who works on them; see ``KVStore``, which is one, for the parameters."""

    def __init__(
        self,
        kv_dir: str | Path,
        *,
        memory_bytes: int | str = 2 << 30,
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
        if not read_only and not _has_index(self._folder.index_path):
            # A new index is bound to the key for good.
            check_files_key(self._folder, self._cipher)
        self._index = ChunkIndex(self._folder.index_path, rule, self._cipher, read_only=read_only)
        self._tier: RemoteTier | None = None
        try:
            self._tier = None if remote is None else open_remote(remote, remote_options)
            self._assemble(limit, self._tier, budget)
        except BaseException:
            self._disconnect()
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
        self.sidecars = Sidecars(
            folder, index, self._writer, self._damage, cipher, self.fetch, self._check_writable, self._side_memory
        )
        self.archive = Archive(folder, index, self._writer, cipher, self.fetch, self._check_writable)

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
        self._reader.forget_all()
        self._side_memory.forget_all()
        self._disconnect()

    def _disconnect(self) -> None:
        try:
            if self._tier is not None:
                self._tier.close()
        finally:
            self._index.close()

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


def _has_index(path: Path) -> bool:
    # One that was only begun has no bytes yet.
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
