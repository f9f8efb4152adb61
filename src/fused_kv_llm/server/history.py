"""The request log: what became of every request, in one SQLite file that outlives the server."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import ConfigError

from .config import ServerConfig
from .history_file import connected, open_file
from .history_query import HistoryQuery
from .history_schema import SUMMARY_COLUMNS, RequestRecord, packed, summary_of, unpacked
from .history_writer import HistoryWriter
from .refusals import RefusedError
from .retention import retain

__all__ = ["History", "open_history"]

_FOLDER = "requests"
_WAIT_S, _SWEEP_S = 5.0, 60.0
_COLUMNS = ", ".join(SUMMARY_COLUMNS)
_MOST_OF_ALL = 8
"""A request that takes more than this part of all bytes has no texts kept, and the log is cut after as much is new."""
_log = logging.getLogger(__name__)


class History:
    """The requests of all tenants; thread-safe, and shared by all processes that serve from one folder.

    Parameters
    ----------
    folder : Path
        Made when the first request is kept, for its owner only.
    max_age_s : float
        How long requests are kept, in seconds.
    max_bytes : int
        How many bytes of them.
    clock : callable
        Seconds since 1970.
    """

    def __init__(self, folder: Path, max_age_s: float, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self.path = folder / "requests.sqlite"
        self._max_age_s, self._max_bytes, self._clock = max_age_s, max_bytes, clock
        self._writer = HistoryWriter(partial(open_file, self.path), str(self.path))
        self._new_bytes = 0

    def add(self, make: Callable[[], RequestRecord], nbytes: int) -> None:
        """Keep a request, soon and in another thread; `nbytes` is about what it takes in memory until then."""
        self._writer.put(lambda connection: self._insert(connection, make()), nbytes)

    def summaries(self, tenant: str, limit: int, wanted: HistoryQuery | None = None) -> list[dict[str, Any]]:
        """Return so many of a tenant's requests, the newest first; the query's own limit is left to the caller.

        Raises
        ------
        RefusedError
            If the file cannot be read.
        """
        wanted = wanted or HistoryQuery()
        condition, values = wanted.conditions()
        query = f"SELECT {_COLUMNS} FROM requests WHERE tenant = ?{condition}"
        if wanted.before is not None:
            query += " AND number < (SELECT number FROM requests WHERE tenant = ? AND id = ?)"
            values += [tenant, wanted.before]
        with self._reading() as connection:
            if connection is None:
                return []
            found = connection.execute(f"{query} ORDER BY number DESC LIMIT ?", (tenant, *values, limit))
            return [summary_of(row) for row in found]

    def detail(self, tenant: str, id_: str) -> dict[str, Any] | None:
        """Return a tenant's request with what is kept of it; None if it is not there.

        Parameters
        ----------
        tenant : str
        id_ : str
            Of the answer, or the name in ``X-Request-Id``, of which the newest counts.

        Raises
        ------
        RefusedError
            If the file cannot be read.
        """
        row = self._row(f"{_COLUMNS}, detail", tenant, id_)
        return None if row is None else summary_of(row[:-1]) | (unpacked(row[-1]) or {})

    def trace(self, tenant: str, id_: str) -> tuple[dict[str, Any] | None] | None:
        """Return the trace of a tenant's prompt, None in its place if it was not kept; None without the request.

        Raises
        ------
        RefusedError
            If the file cannot be read.
        """
        row = self._row("trace", tenant, id_)
        return None if row is None else (unpacked(row[0]),)

    def remove(self, tenant: str, id_: str) -> bool:
        """Forget a request; whether it was there.

        Raises
        ------
        RefusedError
            If the file cannot be written.
        """

        def removed(connection: sqlite3.Connection) -> bool:
            found = connection.execute("DELETE FROM requests WHERE tenant = ? AND id = ?", (tenant, id_)).rowcount
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return found > 0

        with _told():
            self._writer.flush(_WAIT_S)
            return self.path.exists() and self._writer.call(removed, _WAIT_S)

    def sweep(self) -> int:
        """Delete what is too old or too much; return how many requests that were."""
        self._writer.retry()
        since_s = self._clock() - self._max_age_s
        try:
            if not self.path.exists():
                return 0
            return self._writer.call(lambda connection: retain(connection, since_s, self._max_bytes), _SWEEP_S)
        except (sqlite3.Error, OSError, TimeoutError) as error:
            self._writer.fail(error)
            return 0

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._writer.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _insert(self, connection: sqlite3.Connection, record: RequestRecord) -> None:
        blobs = [packed(record.detail), packed(record.trace)]
        if sum(map(len, filter(None, blobs))) > self._max_bytes // _MOST_OF_ALL:
            blobs, record.question = [None, None], None
        summary = record.summary()
        nbytes = sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in (*summary, *blobs))
        names = ("tenant", *SUMMARY_COLUMNS, "nbytes", "detail", "trace")
        marks = ",".join("?" * len(names))
        values = (record.tenant, *summary, nbytes, *blobs)
        # The id is the server's own: the row can only be there if the first attempt came through after all.
        connection.execute(f"INSERT OR IGNORE INTO requests ({', '.join(names)}) VALUES ({marks})", values)
        self._new_bytes += nbytes
        if self._new_bytes > self._max_bytes // _MOST_OF_ALL:
            self._new_bytes = 0
            retain(connection, self._clock() - self._max_age_s, self._max_bytes)

    def _row(self, columns: str, tenant: str, id_: str) -> tuple[Any, ...] | None:
        query = f"SELECT {columns} FROM requests WHERE tenant = :tenant AND"
        with self._reading() as connection:
            if connection is None:
                return None
            for condition in ("id = :id", "request_id = :id ORDER BY number DESC LIMIT 1"):
                row: tuple[Any, ...] | None
                row = connection.execute(f"{query} {condition}", {"tenant": tenant, "id": id_}).fetchone()
                if row is not None:
                    return row
        return None

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """Give a connection that sees what was added before; None if there is no file yet."""
        with _told():
            self._writer.flush(_WAIT_S)
            if not self.path.exists():
                yield None
                return
            with closing(connected(self.path, "ro")) as connection:
                yield connection


def open_history(engine: FusedKVEngine, config: ServerConfig) -> History | None:
    """Return the request log beside the store of an engine; None if none is kept.

    Raises
    ------
    ConfigError
        If texts are asked for beside a store that is encrypted.
    """
    if config.keeps_of_requests == "off":
        return None
    if config.request_log == "texts" and engine.store.is_encrypted:
        raise ConfigError(
            "request_log='texts' would keep what is asked in the clear beside an encrypted store: take 'counts' or "
            "'off'."
        )
    folder = Path(engine.store.kv_dir) / _FOLDER
    return History(folder, config.request_log_days * 86400, config.request_log_bytes)


@contextmanager
def _told() -> Iterator[None]:
    """Refuse what cannot be read or written now."""
    try:
        yield
    except (sqlite3.Error, OSError, TimeoutError) as error:
        _log.warning("The request log cannot be used: %s", error)
        message = "The request log cannot be used now; the server's log says why"
        raise RefusedError(message, 503, kind="server_error", code="request_log_unavailable") from error
