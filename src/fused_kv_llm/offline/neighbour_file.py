"""What is known about the neighbours of stored chunks, in an SQLite file beside the store; no text is in it."""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fused_kv_llm.errors import FusedKVWarning

from .neighbour_index import Near

__all__ = ["NeighbourFile"]

_BUSY_S = 60.0
_KEY_BYTES = 32
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS near (
    corpus TEXT NOT NULL, key TEXT NOT NULL, others BLOB NOT NULL, similarity BLOB NOT NULL,
    PRIMARY KEY (corpus, key)) STRICT, WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS lists (
    corpus TEXT NOT NULL, kind TEXT NOT NULL, key TEXT NOT NULL, others BLOB NOT NULL,
    PRIMARY KEY (corpus, kind, key)) STRICT, WITHOUT ROWID""",
)


class NeighbourFile:
    """The nearest neighbours that were found, and lists of neighbours of other kinds; for several processes.

    Everything in it can be found again. A file that cannot be used is done without, with one ``FusedKVWarning``.

    Parameters
    ----------
    path : Path or None
        None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._is_closed = path is None
        # By process: a connection must not cross a fork, not even to be closed.
        self._connections: dict[int, sqlite3.Connection] = {}
        self._seen: int | None = None
        with self._errors():
            self._connection()

    def has_changed(self) -> bool:
        """Whether another process may have written since the last call; True the first time."""
        with self._errors():
            connection = self._connection()
            if connection is not None:
                (version,) = connection.execute("PRAGMA data_version").fetchone()
                changed, self._seen = bool(version != self._seen), version
                return changed
        return False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Let no other process write; what is saved in here takes effect at the end, or not at all."""
        with self._errors():
            connection = self._connection()
            if connection is not None:
                connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._end("ROLLBACK")
            raise
        self._end("COMMIT")

    def near(self, corpus: str) -> dict[str, Near]:
        """Return the nearest neighbours of every chunk of a corpus."""
        rows = self._select("SELECT key, others, similarity FROM near WHERE corpus = ?", corpus)
        return {
            key: Near(_keys(others), tuple(np.frombuffer(similarity, "<f4").tolist()))
            for key, others, similarity in rows
        }

    def lists(self, corpus: str, kind: str) -> dict[str, tuple[str, ...]]:
        """Return the lists of one kind, by chunk."""
        rows = self._select("SELECT key, others FROM lists WHERE corpus = ? AND kind = ?", corpus, kind)
        return {key: _keys(others) for key, others in rows}

    def save_near(self, corpus: str, found: Mapping[str, Near]) -> None:
        """Keep the nearest neighbours of chunks."""
        rows = [
            (corpus, key, _blob(near.keys), np.array(near.similarity, "<f4").tobytes()) for key, near in found.items()
        ]
        self._write("INSERT OR REPLACE INTO near VALUES (?, ?, ?, ?)", rows)

    def save_lists(self, corpus: str, kind: str, lists: Mapping[str, Sequence[str]]) -> None:
        """Keep lists of one kind."""
        rows = [(corpus, kind, key, _blob(others)) for key, others in lists.items()]
        self._write("INSERT OR REPLACE INTO lists VALUES (?, ?, ?, ?)", rows)

    def forget_near(self, corpus: str, keys: Sequence[str]) -> None:
        """Forget the neighbours of chunks that have gone."""
        self._write("DELETE FROM near WHERE corpus = ? AND key = ?", [(corpus, key) for key in keys])

    def close(self) -> None:
        """Close the file; nothing is kept afterwards."""
        self._is_closed = True
        connection = self._connections.pop(os.getpid(), None)
        if connection is not None:
            connection.close()

    def _connection(self) -> sqlite3.Connection | None:
        """Return this process's connection, opened when it is first needed; None if nothing is kept."""
        found = self._connections.get(os.getpid())
        if found is None and self._path is not None and not self._is_closed:
            found = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._connections[os.getpid()], self._seen = found, None
            self._path.chmod(0o600)
            for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", *_SCHEMA):
                found.execute(statement)
        return found

    def _select(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        with self._errors():
            connection = self._connection()
            if connection is not None:
                return connection.execute(query, values).fetchall()
        return []

    def _write(self, statement: str, rows: Sequence[tuple[str | bytes, ...]]) -> None:
        with self._errors():
            connection = self._connection()
            if connection is not None and rows:
                connection.executemany(statement, rows)

    def _end(self, how: str) -> None:
        with self._errors():
            connection = self._connection()
            if connection is not None and connection.in_transaction:
                connection.execute(how)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self.close()
            warnings.warn(
                f"Neighbours could not be kept in {self._path} ({error}): they are searched again by the next process. "
                "Delete the file, or check the folder's permissions.",
                FusedKVWarning,
                stacklevel=4,
            )


def _blob(keys: Sequence[str]) -> bytes:
    return b"".join(map(bytes.fromhex, keys))


def _keys(blob: bytes) -> tuple[str, ...]:
    digits = blob.hex()
    return tuple(digits[at : at + 2 * _KEY_BYTES] for at in range(0, len(digits), 2 * _KEY_BYTES))
