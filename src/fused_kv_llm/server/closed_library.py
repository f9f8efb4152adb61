"""What is asked of a library's file without opening it as a library: another process may have it open."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from .library_schema import DOCUMENT_BYTES, Owner

__all__ = ["document_bytes_of", "owner_of", "owner_of_expired"]


def owner_of(path: Path) -> Owner | None:
    """Return whose file it is; None if nobody has written that down yet."""
    with closing(_connected(path)) as connection:
        try:
            return _owner_in(connection)
        except sqlite3.OperationalError:
            return None


def owner_of_expired(path: Path, now_s: float) -> Owner | None:
    """Return whose file it is if a document in it has expired."""
    with closing(_connected(path)) as connection:
        query = "SELECT 1 FROM documents WHERE expires_s <= ? LIMIT 1"
        return None if connection.execute(query, (now_s,)).fetchone() is None else _owner_in(connection)


def document_bytes_of(path: Path) -> int:
    """Return how many bytes its documents had when they were uploaded."""
    with closing(_connected(path)) as connection:
        return int(connection.execute(DOCUMENT_BYTES).fetchone()[0])


def _owner_in(connection: sqlite3.Connection) -> Owner | None:
    rows = dict(connection.execute("SELECT name, value FROM about").fetchall())
    return Owner(rows["tenant"], rows.get("apart")) if "tenant" in rows else None


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
