"""The SQLite database of an index: one connection per thread, several processes, every failure a store error."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fused_kv_llm.errors import IndexDamagedError, StoreError, StoreFullError, StoreUnavailableError
from fused_kv_llm.store.folder import connect_read_only, refuse_link

__all__ = ["Database"]

_BUSY_S = 30.0
# Fewer than the variables that every build of SQLite allows in a statement.
_VALUES_AT_ONCE = 500
# Result codes that are about access to the file and not about its content (https://sqlite.org/rescode.html).
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_UNUSABLE = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_INTERRUPT,
)


class Database:
    """An SQLite file with a fixed schema; thread-safe, shared between processes.

    Write-ahead logging lets one process ingest while others answer. SQLite's locks do not work on every
    network file system; the file belongs on a local disk.

    Parameters
    ----------
    path : Path
        The file; created with mode 0600 unless ``read_only``.
    schema : sequence of str
        The ``CREATE`` statements of everything the file contains.
    read_only : bool
        Change nothing.

    Raises
    ------
    IndexDamagedError
        The file is damaged or has another schema.
    StoreUnavailableError
        The file cannot be opened.
    """

    def __init__(self, path: Path, schema: Sequence[str], *, read_only: bool) -> None:
        self._path = path
        self._read_only = read_only
        self._local = threading.local()
        # A connection must not cross a fork, so each remembers the process that opened it.
        self._connections: dict[tuple[int, threading.Thread], sqlite3.Connection] = {}
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._active = 0
        self._closed = False
        if not read_only:
            self._create_file()
        try:
            with self.connection() as connection:
                if not read_only:
                    _create(connection, schema)
                self._check_schema(connection, schema)
        except BaseException:
            self.close()
            raise

    def connection(self) -> AbstractContextManager[sqlite3.Connection]:
        """Return a context manager for this thread's connection, in autocommit mode.

        Raises
        ------
        StoreUnavailableError
            The file is damaged, locked for too long, not writable, or closed.
        StoreFullError
            The disk is full.
        """
        return _Use(self)

    def select_in(self, query: str, values: Sequence[str | int]) -> list[tuple[Any, ...]]:
        """Return the rows of a query that ends with the name of a column, for rows with one of some values in it."""
        found: list[tuple[Any, ...]] = []
        with self.connection() as connection:
            for start in range(0, len(values), _VALUES_AT_ONCE):
                batch = values[start : start + _VALUES_AT_ONCE]
                found += connection.execute(f"{query} IN ({','.join('?' * len(batch))})", batch).fetchall()
        return found

    def begin_use(self) -> sqlite3.Connection:
        """Return this thread's connection, which stays open at least until ``end_use``."""
        with self._changed:
            if self._closed:
                raise StoreUnavailableError("The chunk-KV store was closed. Open a new KVStore.")
            self._active += 1
        try:
            if getattr(self._local, "pid", None) != os.getpid():
                self._local.connection, self._local.pid = self._connect(), os.getpid()
            connection: sqlite3.Connection = self._local.connection
        except BaseException as error:
            self.end_use()
            if isinstance(error, sqlite3.Error):
                raise self.error(error) from error
            raise
        return connection

    def end_use(self) -> None:
        """Allow the connection to be closed again."""
        with self._changed:
            self._active -= 1
            if self._closed:
                self._changed.notify_all()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep every other thread and process from writing; this thread's writes take effect together, or not at all.

        Raises
        ------
        StoreUnavailableError, StoreFullError
            As ``connection``.
        """
        # Threads queue at a lock, because SQLite itself polls with growing pauses.
        with self._writing, self.connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def error(self, error: Exception) -> StoreError:
        """Return the store error for an error of SQLite, or for content that cannot be decoded."""
        text, code = str(error), _code(error)
        if code == sqlite3.SQLITE_FULL:
            return StoreFullError(f"There is no room for the index {self._path}: {text}. Free space.")
        if code in _LOCKED:
            return StoreUnavailableError(
                f"Another process kept {self._path} locked for over {_BUSY_S:.0f} s. Wait for it, or end it."
            )
        if code in _UNUSABLE:
            return StoreUnavailableError(
                f"The index {self._path} cannot be used now: {text}. Its disk may be full or failing, or not writable: "
                "free space, check its permissions and those of its folder, or open the store with read_only=True."
            )
        return IndexDamagedError(f"The index {self._path} is damaged: {text}. {self._how_to_reset()}")

    def close(self) -> None:
        """Close every thread's connection, after calls in flight have ended."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._active == 0, timeout=_BUSY_S)
            for (pid, _), connection in self._connections.items():
                if pid == os.getpid():
                    connection.close()
            self._connections.clear()

    def _create_file(self) -> None:
        try:
            # SQLite gives the write-ahead log the permissions that the file is created with.
            with suppress(FileExistsError):
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreUnavailableError(
                f"The index {self._path} cannot be created: {error}. Set kv_dir to a folder that you may write."
            ) from error

    def _connect(self) -> sqlite3.Connection:
        # SQLite follows a link in place of the database, though not in place of the files beside it.
        refuse_link(str(self._path))
        connection = connect_read_only(self._path, _BUSY_S) if self._read_only else self._connect_for_writing()
        try:
            # The file may come from elsewhere: its schema must not call functions.
            connection.execute("PRAGMA trusted_schema = OFF")
            if not self._read_only:
                connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
        with self._changed:
            for pid, thread in list(self._connections):
                if pid == os.getpid() and not thread.is_alive():
                    self._connections.pop((pid, thread)).close()
            self._connections[os.getpid(), threading.current_thread()] = connection
        return connection

    def _connect_for_writing(self) -> sqlite3.Connection:
        # mode=rw: a database that somebody deleted is not created again.
        uri = f"{self._path.absolute().as_uri()}?mode=rw"
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)

    def _check_schema(self, connection: sqlite3.Connection, schema: Sequence[str]) -> None:
        # This also refuses triggers and look-alike tables.
        query = "SELECT sql FROM sqlite_master WHERE substr(name, 1, 7) != 'sqlite_'"
        if {row[0] for row in connection.execute(query)} != set(schema):
            raise IndexDamagedError(
                f"{self._path} is not an index of this release of fused-kv-llm. {self._how_to_reset()}"
            )

    def _how_to_reset(self) -> str:
        return (
            f"Make a new one from the stored files: fused-kv store check --fix --kv-dir {self._path.parent}; "
            "or set kv_dir to another folder."
        )


class _Use:
    """A connection in use; a class, since a generator would be slow for how often chunks are looked up."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> sqlite3.Connection:
        return self._database.begin_use()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.end_use()
        if isinstance(error, sqlite3.Error):
            raise self._database.error(error) from error


def _code(error: Exception) -> int | None:
    """Return SQLite's primary result code; None if the error is not SQLite's."""
    extended: int | None = getattr(error, "sqlite_errorcode", None)
    # The primary code is in the lowest eight bits.
    return None if extended is None else extended & 0xFF


def _create(connection: sqlite3.Connection, schema: Sequence[str]) -> None:
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            # SQLite does not wait by itself when two processes create the file at the same moment.
            if _code(error) not in _LOCKED or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in schema:
                connection.execute(statement)
