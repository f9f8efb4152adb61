"""The audit: every file against its row and every row against its file, and the index rebuilt from the files.

What can be wrong: a row without its file (missing); a whole file without a row (orphaned); a file that is cut
short or has other bytes (damaged), another format version or another program's content; a file whose name is not
one of ours (foreign); a row that does not say what the file says (wrong row); what a dead writer left (temporary).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fused_kv_llm.errors import ChunkDamagedError, StoreUnavailableError
from fused_kv_llm.store.cipher import Cipher
from fused_kv_llm.store.file_key import check_files_key
from fused_kv_llm.store.header import ChunkHeader
from fused_kv_llm.store.index import ChunkIndex, ChunkRow
from fused_kv_llm.store.layout import Found, StoreFolder
from fused_kv_llm.store.ledger import Place
from fused_kv_llm.store.sides import read_side
from fused_kv_llm.store.staging import STAGING
from fused_kv_llm.store.verify import verify_chunk

__all__ = ["CheckReport", "Finding", "Progress", "check_store", "rebuild_index"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be.

    Parameters
    ----------
    kind : str
        missing, orphaned, damaged, foreign, wrong row, temporary.
    path : str
        The file.
    detail : str
        What exactly.
    action : str
        What was done about it, or would be.
    """

    kind: str
    path: str
    detail: str
    action: str


@dataclass(slots=True)
class CheckReport:
    """The result of an audit.

    Parameters
    ----------
    chunks : int
        Chunks whose file is whole and agrees with its row, after mending.
    nbytes : int
        Bytes of their files.
    findings : list of Finding
        What was wrong.
    fixed : bool
        Whether it was mended.
    """

    chunks: int = 0
    nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    fixed: bool = False

    @property
    def by_kind(self) -> dict[str, int]:
        """Number of findings of each kind."""
        return dict(Counter(finding.kind for finding in self.findings))


class _Audit:
    def __init__(self, folder: StoreFolder, index: ChunkIndex, cipher: Cipher | None, *, fix: bool) -> None:
        self.folder = folder
        self.index = index
        self.cipher = cipher
        self.fix = fix
        self.report = CheckReport(fixed=fix)
        self._scratch = bytearray()
        # Places of files that cannot be used: they are not reported as missing besides.
        self._told: set[tuple[str, str | None]] = set()

    def found(self, kind: str, path: str, detail: str, action: str, mend: Callable[[], object]) -> None:
        if self.fix:
            mend()
        self.report.findings.append(Finding(kind, path, detail, action))

    def file(self, file: Found) -> None:
        if file.key is None:
            self.found(
                "foreign",
                file.path,
                "its name is not one of a chunk's",
                "move it to quarantine",
                partial(self.folder.quarantine_path, file.path),
            )
        elif file.name is None:
            self._chunk(file.key, file.path)
        else:
            self._side(file.key, file.name, file.path)

    def _chunk(self, key: str, path: str) -> None:
        try:
            fd = self.folder.open_file(key)
        except FileNotFoundError:
            return
        except ChunkDamagedError as error:
            self._damaged(key, path, error.reason)
            return
        except OSError as error:
            self._damaged(key, path, f"it cannot be opened ({error})")
            return
        try:
            header = verify_chunk(fd, key, self.cipher, self._scratch)
            nbytes = os.fstat(fd).st_size
        except ChunkDamagedError as error:
            self._damaged(key, path, error.reason)
            return
        finally:
            os.close(fd)
        self._compare(header, path, nbytes)

    def _damaged(self, key: str, path: str, reason: str) -> None:
        def mend() -> None:
            with self.index.transaction():
                self.index.remove([key])
                self.folder.quarantine(key)

        self._told.add((key, None))
        self.found("damaged", path, reason, "move it to quarantine and drop its row", mend)

    def _compare(self, header: ChunkHeader, path: str, nbytes: int) -> None:
        key = header.key
        row = ChunkRow(key, header.identity, header.text, header.token_ids, header.position, nbytes)
        rows, _ = self.index.rows([key])
        place = self.index.ledger.place(key)
        if place is None and not self.index.present([key]):
            self.found(
                "orphaned", path, "the file is whole but has no row", "add the row", partial(self._adopt, row, header)
            )
        elif rows.get(key) != row or place is None or not place.on_disk:
            self.found(
                "wrong row",
                path,
                "the row does not say what the file says",
                "write it again",
                partial(self._adopt, row, header),
            )
        elif self.index.hashes(key) != header.content:
            self.found(
                "wrong row",
                path,
                "the row has other content hashes than the file",
                "write it again",
                partial(self._adopt, row, header),
            )
        if self.fix or rows.get(key) == row:
            self.report.chunks += 1
            self.report.nbytes += nbytes

    def _adopt(self, row: ChunkRow, header: ChunkHeader) -> None:
        with self.index.transaction():
            if not self.folder.has(row.key):
                return
            place = self.index.ledger.place(row.key)
            self.index.remove([row.key])
            self.index.add(row, header.content)
            where = Place(on_disk=True, on_remote=place is not None and place.on_remote)
            self.index.ledger.add(row.key, row.nbytes, float(header.num_tokens), time.time(), where)

    def _side(self, key: str, name: str, path: str) -> None:
        def drop() -> None:
            with self.index.transaction():
                self.index.ledger.drop_side(key, name)
                self.folder.quarantine(key, name)

        try:
            read_side(self.folder, key, name, self.cipher)
            nbytes = os.stat(path).st_size
        except FileNotFoundError:
            # Evicted or deleted meanwhile.
            return
        except (ChunkDamagedError, OSError) as error:
            self._told.add((key, name))
            self.found("damaged", path, str(error), "move it to quarantine", drop)
            return
        if self.index.ledger.place(key) is None:
            self.found("orphaned", path, "its chunk is not stored", "delete it", partial(self.folder.remove, key, name))
        elif self.index.ledger.sides(key).get(name) != nbytes:
            self.found(
                "wrong row",
                path,
                "the side file has no row, or another size",
                "write the row again",
                partial(self._adopt_side, key, name, nbytes),
            )

    def _adopt_side(self, key: str, name: str, nbytes: int) -> None:
        with self.index.transaction():
            self.index.ledger.add_side(key, name, nbytes)

    def rows(self) -> None:
        after = ""
        while batch := self.index.all_keys(after):
            for key, _ in batch:
                if (key, None) in self._told:
                    continue
                place = self.index.ledger.place(key)
                if (place is None or place.on_disk) and not self.folder.has(key):
                    self.found(
                        "missing",
                        self.folder.chunk_path(key),
                        "the row has no file",
                        "drop the row",
                        partial(self._drop_row, key),
                    )
                    continue
                for name in self.index.ledger.sides(key):
                    if (key, name) in self._told or place is None or not place.on_disk:
                        continue
                    if not self.folder.has(key, name):
                        self.found(
                            "missing",
                            self.folder.chunk_path(key, name),
                            "the side file's row has no file",
                            "drop the row",
                            partial(self._drop_side, key, name),
                        )
            after = batch[-1][0]

    def _drop_row(self, key: str) -> None:
        with self.index.transaction():
            place = self.index.ledger.place(key)
            # It may have been evicted to the remote tier, or put again, since it was looked at.
            if (place is None or place.on_disk) and not self.folder.has(key):
                self.index.remove([key])

    def _drop_side(self, key: str, name: str) -> None:
        with self.index.transaction():
            self.index.ledger.drop_side(key, name)

    def temporary(self) -> None:
        staging = self.folder.staging
        for name in staging.abandoned():
            path = str(self.folder.root / STAGING / name)
            self.found("temporary", path, "its writer is gone", "delete it", partial(staging.delete, name))


def check_store(
    folder: StoreFolder, index: ChunkIndex, cipher: Cipher | None, *, fix: bool, progress: Progress | None = None
) -> CheckReport:
    """Audit a store, and mend it if asked to; other processes may go on using it.

    Parameters
    ----------
    folder, index : StoreFolder, ChunkIndex
        The store's.
    cipher : Cipher or None
        Decrypts the files.
    fix : bool
        Whether to mend.
    progress : callable or None
        Called with the number of files done and their number.

    Returns
    -------
    CheckReport

    Raises
    ------
    StoreUnavailableError
        It should be mended, and no file was written with this key: each would be taken for damaged.
    """
    if fix:
        check_files_key(folder, cipher)
    audit = _Audit(folder, index, cipher, fix=fix)
    files = sorted(folder.walk(), key=lambda file: (file.name is not None, file.path))
    for number, file in enumerate(files, 1):
        audit.file(file)
        if progress is not None:
            progress(number, len(files))
    audit.rows()
    audit.temporary()
    if fix:
        with index.transaction():
            index.ledger.recount()
    return audit.report


def rebuild_index(kv_dir: str | Path) -> Path | None:
    """Move an index that cannot be opened out of the way; ``KVStore(kv_dir).check(fix=True)`` then makes a new one.

    No process may have the store open. The new index needs the key that the files were written with.

    Parameters
    ----------
    kv_dir : str or Path

    Returns
    -------
    Path or None
        Where the old index is now; None if there was none.

    Raises
    ------
    StoreUnavailableError
        It cannot be moved.
    """
    root = Path(kv_dir).expanduser()
    index = root / "index.sqlite"
    if not index.exists():
        return None
    target = root / "quarantine" / f"index.{time.time_ns()}.sqlite"
    try:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{index}{suffix}")
        os.replace(index, target)
    except OSError as error:
        raise StoreUnavailableError(f"The index {index} cannot be moved to {target}: {error}.") from error
    return target
