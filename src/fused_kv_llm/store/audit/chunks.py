"""The audit of chunks: every chunk's file against its row, and every row against its file."""

from __future__ import annotations

import os
import time
from functools import partial

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.audit.audit import Audit
from fused_kv_llm.store.format import ChunkHeader
from fused_kv_llm.store.index import ChunkRow, Place
from fused_kv_llm.store.read import verify_chunk

__all__ = ["ChunkAudit"]


class ChunkAudit:
    """Audits the chunks of a store.

    Parameters
    ----------
    audit : Audit
        Receives the findings.
    """

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._folder = audit.folder
        self._index = audit.index
        self._scratch = bytearray()

    def file(self, key: str, path: str) -> None:
        """Verify a chunk's file, and compare it with its row."""
        fd = self._audit.opened(key)
        if fd is None:
            return
        try:
            header = verify_chunk(self._audit.codec, fd, key, self._scratch)
            nbytes = os.fstat(fd).st_size
        except ChunkDamagedError as error:
            self._audit.unusable(key, None, error)
            return
        finally:
            os.close(fd)
        self._compare(header, path, nbytes)

    def _compare(self, header: ChunkHeader, path: str, nbytes: int) -> None:
        key, report = header.key, self._audit.report
        row = ChunkRow.from_header(header, nbytes)
        rows, _ = self._index.rows([key])
        place = self._index.ledger.place(key)
        kind, detail, action = "wrong row", "", "write it again"
        if place is None and not self._index.present([key]):
            kind, detail, action = "orphaned", "the file is undamaged but has no row", "add the row"
        elif rows.get(key) != row or place is None or not place.on_disk:
            detail = "the row does not say what the file says"
        elif self._index.hashes(key) != header.content:
            detail = "the row has other content hashes than the file"
        if detail:
            self._audit.will_be(key, on_disk=True)
            self._audit.found(kind, path, detail, action, partial(self._adopt, row, header))
        if self._audit.fix or rows.get(key) == row:
            report.chunks += 1
            report.nbytes += nbytes

    def _adopt(self, row: ChunkRow, header: ChunkHeader) -> bool:
        with self._index.transaction():
            if not self._folder.has(row.key):
                return False
            place, sidecars = self._index.ledger.place(row.key), self._index.ledger.sidecars(row.key)
            self._index.remove([row.key])
            self._index.add(row, header.content)
            where = Place(on_disk=True, on_remote=place is not None and place.on_remote)
            self._index.ledger.add(row.key, row.nbytes, float(header.num_tokens), time.time(), where)
            for name, nbytes in sidecars.items():
                self._index.ledger.add_sidecar(row.key, name, nbytes)
        return True

    def rows(self) -> None:
        """Look for rows whose file is gone."""
        after = ""
        while batch := self._index.all_keys(after):
            for key, _ in batch:
                if not self._audit.is_unusable(key) and self._is_missing(key):
                    self._audit.will_be(key, on_disk=False)
                    path = self._folder.chunk_path(key)
                    place = self._index.ledger.place(key)
                    away = place is not None and place.on_remote
                    action = "note that only the remote tier has it" if away else "drop the row"
                    self._audit.found("missing", path, "the row has no file", action, partial(self._drop, key))
            after = batch[-1][0]

    def _is_missing(self, key: str) -> bool:
        place = self._index.ledger.place(key)
        return (place is None or place.on_disk) and not self._folder.has(key)

    def _drop(self, key: str) -> bool:
        with self._index.transaction():
            # It may have been evicted to the remote tier, or stored again, meanwhile.
            if not self._is_missing(key):
                return False
            place = self._index.ledger.place(key)
            if place is not None and place.on_remote:
                self._index.ledger.move(key, Place(on_disk=False, on_remote=True))
            else:
                self._index.remove([key], "damaged")
        return True
