"""Opening an SQLite index that must not be changed, even in a folder that cannot be written.

An index in write-ahead mode has two files beside it: a log with the latest rows, and memory that its users share
(https://sqlite.org/wal.html#read_only_databases). Both disappear when the last process closes the index properly.
SQLite cannot create them in a folder that cannot be written.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

__all__ = ["connect_read_only"]


def connect_read_only(path: Path, timeout_s: float) -> sqlite3.Connection:
    """Open an index for reading, in autocommit mode; the connection may be used in any thread.

    Parameters
    ----------
    path : Path
        The index.
    timeout_s : float
        How long to wait for other processes' locks.

    Raises
    ------
    sqlite3.Error
        It cannot be opened.
    """
    uri, alone = f"{path.absolute().as_uri()}?mode=ro", False
    log, shared = (_size(path.with_name(path.name + suffix)) for suffix in ("-wal", "-shm"))
    # A writer keeps both files open: if one of them is missing nobody writes, and no lock is needed.
    if not os.access(path.parent, os.W_OK) and (log is None or shared is None):
        alone = bool(log)
        uri += "&vfs=unix-none" if alone else "&immutable=1"
    connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    if alone:
        # In this mode SQLite keeps the shared memory inside the process, so that it can read the log.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
