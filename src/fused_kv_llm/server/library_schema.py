"""What a document, a chunk of it and a job are, whose they are, and the tables that hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["DOCUMENT_BYTES", "ENDED", "LIBRARY_SCHEMA", "Chunk", "Document", "Job", "JobState", "Owner"]

JobState = Literal[
    "queued", "parsing", "chunking", "prefilling", "embedding", "done", "failed", "cancelled", "interrupted"
]
ENDED: frozenset[str] = frozenset({"done", "failed", "cancelled", "interrupted"})
"""States in which nothing is done for a job any more; all but the first can be resumed from."""

LIBRARY_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    """CREATE TABLE IF NOT EXISTS documents (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    suffix TEXT NOT NULL,
    metadata TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    created_s REAL NOT NULL,
    expires_s REAL,
    ready INTEGER NOT NULL DEFAULT 0,
    content BLOB
) STRICT""",
    """CREATE TABLE IF NOT EXISTS chunks (
    document INTEGER NOT NULL REFERENCES documents (number) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    text TEXT NOT NULL,
    vector BLOB,
    PRIMARY KEY (document, number)
) STRICT, WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS chunks_text ON chunks (text)",
    """CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    document TEXT NOT NULL,
    state TEXT NOT NULL,
    done INTEGER NOT NULL DEFAULT 0,
    total INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    created_s REAL NOT NULL,
    changed_s REAL NOT NULL
) STRICT""",
)

DOCUMENT_BYTES = "SELECT coalesce(sum(nbytes), 0) FROM documents"
"""The bytes that all documents of a library had when they were uploaded."""


class Owner(NamedTuple):
    """Whose documents: the tenant of the key, and the further name that its client gave."""

    tenant: str
    apart: str | None


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a tenant.

    Parameters
    ----------
    id, name, suffix : str
        The name is the client's and never a path; the suffix says how the document is read.
    metadata : str
        The client's own, as JSON.
    nbytes : int
        Size of what was uploaded.
    created_s, expires_s : float, float or None
        Seconds since 1970; None never expires.
    ready : int
        Whether it can be retrieved.
    chunks : int
        How many it has.
    """

    id: str
    name: str
    suffix: str
    metadata: str
    nbytes: int
    created_s: float
    expires_s: float | None
    ready: int
    chunks: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as clients see it."""
        return {
            "id": self.id,
            "object": "document",
            "name": self.name,
            "type": self.suffix.removeprefix("."),
            "metadata": json.loads(self.metadata),
            "bytes": self.nbytes,
            "created_at": int(self.created_s),
            "expires_at": None if self.expires_s is None else int(self.expires_s),
            "ready": bool(self.ready),
            "chunks": self.chunks,
        }


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a document: its number there, counted from 0, and its text."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Job:
    """The ingestion of a document.

    Parameters
    ----------
    id, document : str
    state : str
        One of :data:`JobState`.
    done, total : int
        Chunks whose KV is stored, and all of them; both 0 before they are known.
    error : str or None
        Why it failed.
    created_s, changed_s : float
        Seconds since 1970.
    """

    id: str
    document: str
    state: JobState
    done: int
    total: int
    error: str | None
    created_s: float
    changed_s: float

    @property
    def ended(self) -> bool:
        """Whether nothing is done for it any more."""
        return self.state in ENDED

    def to_dict(self) -> dict[str, Any]:
        """Return it as clients see it."""
        return {
            "id": self.id,
            "object": "job",
            "document_id": self.document,
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "error": self.error,
            "created_at": int(self.created_s),
            "changed_at": self.changed_s,
        }
