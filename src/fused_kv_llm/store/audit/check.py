"""The audit: every file against its row and every row against its file.

The kinds of findings:

- missing: a row without its file
- orphaned: an undamaged file without a row
- damaged: a file that is truncated, altered, of another format version or of another program
- other key: an undamaged file that was not written with the store's key
- unreadable: a file that the system does not let us open
- foreign: a file whose name is not one of a store's
- wrong row: a row that disagrees with its file
- temporary: what a dead writer left

Those of a remote tier are the same, see :mod:`fused_kv_llm.store.audit.remote`.

Chunks are audited before sidecars, their files before their rows: whether a sidecar still has a chunk is known only
when all chunks were audited, and so one audit mends everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from fused_kv_llm.store.audit.audit import Audit
from fused_kv_llm.store.audit.chunks import ChunkAudit
from fused_kv_llm.store.audit.findings import CheckReport, Progress
from fused_kv_llm.store.audit.remote import RemoteAudit
from fused_kv_llm.store.audit.sidecars import SidecarAudit
from fused_kv_llm.store.folder import STAGING, StoreFolder, check_files_key
from fused_kv_llm.store.format import FileCodec
from fused_kv_llm.store.index import ChunkIndex
from fused_kv_llm.store.remote import RemoteTier

__all__ = ["check_remote", "check_store"]


def check_store(
    folder: StoreFolder,
    index: ChunkIndex,
    codec: FileCodec,
    *,
    fix: bool,
    take_other_keys: bool = False,
    progress: Progress | None = None,
) -> CheckReport:
    """Audit a store, and mend it if asked to; other processes may go on using it.

    Parameters
    ----------
    folder, index : StoreFolder, ChunkIndex
        The store's.
    codec : FileCodec
        Decodes the files.
    fix : bool
        Whether to mend.
    take_other_keys : bool
        Whether to move files to quarantine that were not written with this key.
    progress : callable or None
        Called with the number of files done and their number.

    Returns
    -------
    CheckReport

    Raises
    ------
    StoreUnavailableError
        With `fix`: no file was written with this key, so that each would be taken for damaged.
    """
    if fix:
        check_files_key(folder, codec)
    audit = Audit(folder, index, codec, fix=fix, take_other_keys=take_other_keys)
    chunks, sidecars = ChunkAudit(audit), SidecarAudit(audit)
    files = sorted(folder.walk(), key=lambda file: file.path)
    tell = _teller(progress, len(files))
    for file in files:
        if file.name is None:
            _foreign(audit, file.path) if file.key is None else chunks.file(file.key, file.path)
            tell()
    chunks.rows()
    for file in files:
        if file.key is not None and file.name is not None:
            sidecars.file(file.key, file.name)
            tell()
    sidecars.rows()
    _temporary(audit)
    if fix:
        with index.transaction():
            index.ledger.recount()
    return audit.report


def check_remote(
    folder: StoreFolder,
    index: ChunkIndex,
    codec: FileCodec,
    remote: RemoteTier,
    *,
    fix: bool,
    progress: Progress | None = None,
) -> CheckReport:
    """Audit the remote tier of a store, and mend it if asked to; other machines may go on using it.

    Parameters
    ----------
    folder, index, codec : StoreFolder, ChunkIndex, FileCodec
        The store's.
    remote : RemoteTier
    fix : bool
        Whether to mend.
    progress : callable or None
        Called with the number of bytes read and their number.

    Returns
    -------
    CheckReport
        Of the remote tier alone.

    Raises
    ------
    StoreUnavailableError
        The remote tier cannot be used. With `fix`: no file on the disk was written with this key.
    """
    if fix:
        check_files_key(folder, codec)
    audit = Audit(folder, index, codec, fix=fix, take_other_keys=False)
    RemoteAudit(audit, remote).run(progress)
    return audit.report


def _teller(progress: Progress | None, total: int) -> Callable[[], None]:
    done = itertools.count(1)

    def tell() -> None:
        if progress is not None:
            progress(next(done), total)

    return tell


def _foreign(audit: Audit, path: str) -> None:
    def move() -> bool:
        return audit.folder.quarantine_path(path) is not None

    audit.found("foreign", path, "its name is not one of a chunk's", "move it to quarantine", move)


def _temporary(audit: Audit) -> None:
    staging = audit.folder.staging
    for name in staging.abandoned():
        path = str(audit.folder.root / STAGING / name)
        audit.found("temporary", path, "its writer is gone", "delete it", partial(staging.delete, name))
