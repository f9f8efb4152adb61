"""The audit of sidecars, after that of the chunks: a sidecar without a chunk is deleted."""

from __future__ import annotations

import os
from functools import partial

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.audit.audit import Audit
from fused_kv_llm.store.read import verify_sidecar

__all__ = ["SidecarAudit"]


class SidecarAudit:
    """Audits the sidecars of a store.

    Parameters
    ----------
    audit : Audit
        Has audited the chunks; receives the findings.
    """

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._folder = audit.folder
        self._index = audit.index

    def file(self, key: str, name: str) -> None:
        """Verify a sidecar, and compare it with its row."""
        fd = self._audit.opened(key, name)
        if fd is None:
            return
        try:
            verify_sidecar(self._audit.codec, fd, key, name)
            nbytes = os.fstat(fd).st_size
        except ChunkDamagedError as error:
            self._audit.unusable(key, name, error)
        else:
            self._compare(key, name, nbytes)
        finally:
            os.close(fd)

    def _compare(self, key: str, name: str, nbytes: int) -> None:
        path = self._folder.chunk_path(key, name)
        if not self._audit.is_on_disk(key):
            detail = "its chunk is not on the disk"
            self._audit.found("orphaned", path, detail, "delete it", partial(self._remove, key, name))
        elif self._index.ledger.sidecars(key).get(name) != nbytes:
            detail = "the sidecar has no row, or another size"
            self._audit.found("wrong row", path, detail, "write the row again", partial(self._adopt, key, name, nbytes))

    def _remove(self, key: str, name: str) -> bool:
        with self._index.transaction():
            # Its chunk may have been stored meanwhile, or copied from the remote tier.
            return not self._audit.is_on_disk(key) and self._folder.remove(key, name)

    def _adopt(self, key: str, name: str, nbytes: int) -> bool:
        with self._index.transaction():
            return self._folder.has(key, name) and self._index.ledger.add_sidecar(key, name, nbytes)

    def rows(self) -> None:
        """Look for rows of sidecars that are gone."""
        after = ""
        while batch := self._index.all_keys(after):
            for key, _ in batch:
                for name in self._index.ledger.sidecars(key):
                    if not self._audit.is_unusable(key, name) and self._is_missing(key, name):
                        path = self._folder.chunk_path(key, name)
                        detail = "the sidecar's row has no file"
                        self._audit.found("missing", path, detail, "drop the row", partial(self._drop, key, name))
            after = batch[-1][0]

    def _is_missing(self, key: str, name: str) -> bool:
        return self._audit.is_on_disk(key) and not self._folder.has(key, name)

    def _drop(self, key: str, name: str) -> bool:
        with self._index.transaction():
            # It may have been written meanwhile.
            if not self._is_missing(key, name):
                return False
            self._index.ledger.drop_sidecar(key, name)
        return True
