"""The SQLite file of the request log: made for its owner only, shared by processes, giving space back."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

from .history_schema import HISTORY_SCHEMA

__all__ = ["connected", "open_file"]

_VERSION = 1
_BUSY_S = 10.0


def open_file(path: Path) -> sqlite3.Connection:
    """Return a connection that writes, to a file that is made if need be.

    Raises
    ------
    sqlite3.Error, OSError
        If the file cannot be made or used, or is of another release.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # The log beside the file gets its mode.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    connection = connected(path, "rw")
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connected(path: Path, mode: str) -> sqlite3.Connection:
    """Return a connection to a file that is there, for reading (``"ro"``) or writing (``"rw"``)."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=_BUSY_S, isolation_level=None,
        check_same_thread=False,
    )  # fmt: skip
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, _VERSION):
        raise sqlite3.DatabaseError(f"it is of another release (version {version}, not {_VERSION})")
    # Both have to be said before there is a table; the first waits for others, the second does not by itself.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    deadline_s = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous = NORMAL")
    # What was deleted is overwritten.
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        for statement in HISTORY_SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {_VERSION}")
