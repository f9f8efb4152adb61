"""The documents of one tenant and the jobs that ingest them: one SQLite file, which outlives the server."""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from .library_schema import DOCUMENT_BYTES, ENDED, LIBRARY_SCHEMA, Chunk, Document, Job, JobState, Owner
from .refusals import RefusedError

__all__ = ["Library"]

_DOCUMENT = """SELECT id, name, suffix, metadata, nbytes, created_s, expires_s, ready,
    (SELECT count(*) FROM chunks WHERE document = documents.number) FROM documents"""
_JOB = "SELECT id, document, state, done, total, error, created_s, changed_s FROM jobs"
# An expired document is gone for clients at once, and from the file when it is swept.
_ALIVE = "(expires_s IS NULL OR expires_s > ?)"


class Library:
    """The documents and jobs of one tenant; thread-safe, and one process's at a time.

    Jobs that had not ended when the file was last closed are ``interrupted``.

    Parameters
    ----------
    path : Path or None
        The SQLite file; made if need be. None keeps everything in memory.
    clock : callable
        Seconds since 1970.

    Attributes
    ----------
    path : Path or None
    version : int
        Grows whenever what can be retrieved changes.

    Raises
    ------
    RefusedError
        If another process has it open.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._mutex = clock, threading.RLock()
        self.path, self.version = path, 0
        self._file_lock = None if path is None else _taken(path)
        self._connection = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
        if path is not None:
            path.chmod(0o600)
        # SQLite's own lower() knows ASCII only.
        self._connection.create_function("casefold", 1, str.casefold, deterministic=True)
        for statement in ("PRAGMA journal_mode=WAL", "PRAGMA foreign_keys=ON", *LIBRARY_SCHEMA):
            self._connection.execute(statement)
        marks = ",".join("?" * len(ENDED))
        update = f"UPDATE jobs SET state = 'interrupted', changed_s = ? WHERE state NOT IN ({marks})"
        self._connection.execute(update, (clock(), *ENDED))

    def close(self) -> None:
        """Close the file, and let others open it."""
        with self._mutex:
            self._connection.close()
            if self._file_lock is not None:
                self._file_lock.release()

    def now_s(self) -> float:
        """Return the time by which documents expire."""
        return self._clock()

    def about(self, owner: Owner) -> None:
        """Remember whose documents these are."""
        with self._mutex:
            rows = [("tenant", owner.tenant), *([] if owner.apart is None else [("apart", owner.apart)])]
            self._connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)

    # -- documents -------------------------------------------------------------------------------------------

    def add(self, name: str, suffix: str, content: bytes, metadata: str, expires_s: float | None) -> tuple[str, str]:
        """Keep an upload, and return the ids of its document and of the job that will ingest it."""
        document = f"doc-{uuid.uuid4().hex}"
        insert = "INSERT INTO documents (id, name, suffix, metadata, nbytes, created_s, expires_s, content)"
        values = (document, name, suffix, metadata, len(content), self._clock(), expires_s, content)
        with self._transaction() as connection:
            connection.execute(f"{insert} VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            return document, self.add_job(document)

    def document(self, id_: str) -> Document | None:
        """Return a document that has not expired."""
        with self._mutex:
            row = self._connection.execute(f"{_DOCUMENT} WHERE id = ? AND {_ALIVE}", (id_, self._clock())).fetchone()
        return None if row is None else Document(*row)

    def documents(self, limit: int, after: str | None = None, search: str | None = None) -> list[Document]:
        """Return documents in the order in which they came, from behind one on, with this in their name or id."""
        query = f"""{_DOCUMENT} WHERE number > coalesce((SELECT number FROM documents WHERE id = :after), 0)
            AND (expires_s IS NULL OR expires_s > :now_s)
            AND (:search IS NULL OR instr(casefold(name || ' ' || id), :search)) ORDER BY number LIMIT :limit"""
        wanted = None if search is None else search.casefold()
        with self._mutex:
            values = {"after": after, "now_s": self._clock(), "search": wanted, "limit": limit}
            rows = self._connection.execute(query, values)
            return [Document(*row) for row in rows]

    def document_bytes(self) -> int:
        """Return how many bytes all documents had when they were uploaded."""
        with self._mutex:
            return int(self._connection.execute(DOCUMENT_BYTES).fetchone()[0])

    def expired(self) -> list[str]:
        """Return the ids of documents whose time is over."""
        with self._mutex:
            rows = self._connection.execute("SELECT id FROM documents WHERE expires_s <= ?", (self._clock(),))
            return [id_ for (id_,) in rows]

    def remove(self, id_: str) -> list[str] | None:
        """Forget a document, and return those of its texts that no other one has; None if it is not there."""
        alone = """SELECT DISTINCT text FROM chunks WHERE document = :number AND NOT EXISTS
            (SELECT 1 FROM chunks AS other WHERE other.text = chunks.text AND other.document != :number)"""
        with self._transaction() as connection:
            found = connection.execute("SELECT number FROM documents WHERE id = ?", (id_,)).fetchone()
            if found is None:
                return None
            texts = [text for (text,) in connection.execute(alone, {"number": found[0]})]
            connection.execute("DELETE FROM documents WHERE number = ?", found)
            cancel = "UPDATE jobs SET state = 'cancelled', changed_s = ? WHERE document = ?"
            connection.execute(f"{cancel} AND state != 'done'", (self._clock(), id_))
            self.version += 1
        return texts

    def expire(self, id_: str, expires_s: float | None) -> None:
        """Say until when a document is kept."""
        with self._transaction() as connection:
            connection.execute("UPDATE documents SET expires_s = ? WHERE id = ?", (expires_s, id_))
            self.version += 1

    # -- what is in them -------------------------------------------------------------------------------------

    def content(self, id_: str) -> bytes | None:
        """Return what was uploaded; None once it has been split into chunks."""
        with self._mutex:
            row = self._connection.execute("SELECT content FROM documents WHERE id = ?", (id_,)).fetchone()
        return None if row is None else row[0]

    def put_chunks(self, id_: str, texts: Sequence[str]) -> None:
        """Keep the chunks of a document in place of what was uploaded."""
        with self._transaction() as connection:
            found = connection.execute("SELECT number FROM documents WHERE id = ?", (id_,)).fetchone()
            if found is not None:
                connection.execute("DELETE FROM chunks WHERE document = ?", found)
                rows = ((*found, number, text) for number, text in enumerate(texts))
                connection.executemany("INSERT INTO chunks (document, number, text) VALUES (?, ?, ?)", rows)
                connection.execute("UPDATE documents SET content = NULL WHERE number = ?", found)

    def chunks(self, id_: str) -> list[Chunk]:
        """Return the chunks of a document, in its order."""
        query = "SELECT chunks.number, text FROM chunks JOIN documents ON document = documents.number WHERE id = ?"
        with self._mutex:
            return [Chunk(*row) for row in self._connection.execute(f"{query} ORDER BY chunks.number", (id_,))]

    def put_vectors(self, id_: str, vectors: NDArray[np.float32]) -> None:
        """Keep one vector a chunk, ``[chunks, dimensions]``; from now on the document can be retrieved."""
        update = (
            "UPDATE chunks SET vector = ? WHERE number = ? AND document = (SELECT number FROM documents WHERE id = ?)"
        )
        with self._transaction() as connection:
            connection.executemany(update, ((vector.tobytes(), n, id_) for n, vector in enumerate(vectors)))
            connection.execute("UPDATE documents SET ready = 1 WHERE id = ?", (id_,))
            self.version += 1

    def unused(self, texts: Sequence[str]) -> list[str]:
        """Return those of some texts that no document has."""
        query = "SELECT 1 FROM chunks WHERE text = ? LIMIT 1"
        with self._mutex:
            return [text for text in texts if self._connection.execute(query, (text,)).fetchone() is None]

    def retrievable(self) -> tuple[list[tuple[str, str, int, str, bytes]], float]:
        """Return what can be retrieved, and until when that is all of it.

        Returns
        -------
        list of tuple
            Document's id and name, the chunk's number, text and vector.
        float
            Seconds since 1970 at which the next document expires.
        """
        query = f"""SELECT id, name, chunks.number, text, vector FROM chunks JOIN documents
            ON document = documents.number WHERE ready AND {_ALIVE} ORDER BY document"""
        with self._mutex:
            now_s = self._clock()
            rows = self._connection.execute(query, (now_s,)).fetchall()
            soonest = "SELECT min(expires_s) FROM documents WHERE expires_s > ?"
            until_s = self._connection.execute(soonest, (now_s,)).fetchone()[0]
        return rows, float("inf") if until_s is None else until_s

    # -- jobs ------------------------------------------------------------------------------------------------

    def add_job(self, document: str) -> str:
        """Note a further job of a document, and return its id."""
        id_, now_s = f"job-{uuid.uuid4().hex}", self._clock()
        with self._mutex:
            insert = "INSERT INTO jobs (id, document, state, created_s, changed_s) VALUES (?, ?, 'queued', ?, ?)"
            self._connection.execute(insert, (id_, document, now_s, now_s))
        return id_

    def has_open_jobs(self, document: str | None = None) -> bool:
        """Whether something is being done for a document, or for any, or is going to be."""
        marks = ",".join("?" * len(ENDED))
        query = f"SELECT 1 FROM jobs WHERE state NOT IN ({marks}) AND document = coalesce(?, document) LIMIT 1"
        with self._mutex:
            return self._connection.execute(query, (*ENDED, document)).fetchone() is not None

    def job(self, id_: str) -> Job | None:
        """Return a job."""
        with self._mutex:
            row = self._connection.execute(f"{_JOB} WHERE id = ?", (id_,)).fetchone()
        return None if row is None else Job(*row)

    def jobs(self, limit: int, after: str | None = None) -> list[Job]:
        """Return jobs in the order in which they came, from behind one on."""
        query = f"{_JOB} WHERE number > coalesce((SELECT number FROM jobs WHERE id = ?), 0) ORDER BY number LIMIT ?"
        with self._mutex:
            return [Job(*row) for row in self._connection.execute(query, (after, limit))]

    def move_job(
        self,
        id_: str,
        state: JobState,
        *,
        among: Sequence[str],
        done: int = 0,
        total: int = 0,
        error: str | None = None,
    ) -> bool:
        """Put a job into a state, and return whether it was in one of those that were named."""
        marks = ",".join("?" * len(among))
        update = "UPDATE jobs SET state = ?, done = ?, total = ?, error = ?, changed_s = ?"
        with self._mutex:
            values = (state, done, total, error, self._clock(), id_, *among)
            return self._connection.execute(f"{update} WHERE id = ? AND state IN ({marks})", values).rowcount == 1

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


def _taken(path: Path) -> FileLock:
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RefusedError("Another server has these documents open", 503, kind="server_error") from error
    return lock
