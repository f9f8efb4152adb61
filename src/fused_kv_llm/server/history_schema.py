"""What is kept of a request, and the table that holds it."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, fields
from typing import Any, Literal

__all__ = ["HISTORY_SCHEMA", "SUMMARY_COLUMNS", "RequestRecord", "RequestStatus", "packed", "summary_of", "unpacked"]

RequestStatus = Literal["ok", "cancelled", "refused", "failed"]

HISTORY_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    request_id TEXT NOT NULL,
    created_s REAL NOT NULL,
    endpoint TEXT NOT NULL,
    model TEXT,
    status TEXT NOT NULL,
    http_status INTEGER NOT NULL,
    stream INTEGER,
    error TEXT,
    selector TEXT,
    recompute_ratio REAL,
    prompt_tokens INTEGER,
    completion_tokens INTEGER,
    prefix_tokens INTEGER,
    reused_tokens INTEGER,
    recomputed_tokens INTEGER,
    fresh_tokens INTEGER,
    ttft_s REAL,
    latency_s REAL,
    saved_s REAL,
    verdicts TEXT NOT NULL,
    question TEXT,
    nbytes INTEGER NOT NULL,
    detail BLOB,
    trace BLOB
) STRICT""",
    "CREATE INDEX IF NOT EXISTS requests_tenant ON requests (tenant, number)",
    "CREATE INDEX IF NOT EXISTS requests_name ON requests (tenant, request_id)",
    "CREATE INDEX IF NOT EXISTS requests_created ON requests (created_s)",
)

_JSON = ("error", "verdicts")


@dataclass(slots=True)
class RequestRecord:
    """What is kept of one request; the names are those of the table's columns.

    Parameters
    ----------
    id, request_id : str
        The answer's id, and the name in ``X-Request-Id``, which a client may choose.
    tenant : str
        Whose it is, as the engines' tenants are called.
    created_s : float
        Seconds since 1970.
    endpoint : str
    model : str or None
    status : {"ok", "cancelled", "refused", "failed"}
    http_status : int
        499 of a client that has left.
    stream : bool or None
    error : dict or None
        ``type``, ``code`` and ``message`` of OpenAI's error object.
    selector : str or None
    recompute_ratio : float or None
    prompt_tokens, completion_tokens, prefix_tokens, reused_tokens, recomputed_tokens, fresh_tokens : int or None
        None where the prompt was not computed; of an answer that was left as far as it came.
    ttft_s, latency_s : float or None
    saved_s : float or None
        None where it is not known.
    verdicts : dict of str to int
        Chunks by what became of them.
    question : str or None
        Beginning of the last message.
    detail, trace : dict or None
    """

    id: str
    request_id: str
    tenant: str
    created_s: float
    endpoint: str
    model: str | None = None
    status: RequestStatus = "ok"
    http_status: int = 200
    stream: bool | None = None
    error: dict[str, Any] | None = None
    selector: str | None = None
    recompute_ratio: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prefix_tokens: int | None = None
    reused_tokens: int | None = None
    recomputed_tokens: int | None = None
    fresh_tokens: int | None = None
    ttft_s: float | None = None
    latency_s: float | None = None
    saved_s: float | None = None
    verdicts: dict[str, int] = field(default_factory=dict)
    question: str | None = None
    detail: dict[str, Any] | None = None
    trace: dict[str, Any] | None = None

    def summary(self) -> list[Any]:
        """Return the values of :data:`SUMMARY_COLUMNS`."""
        return [_plain(name, getattr(self, name)) for name in SUMMARY_COLUMNS]


def _plain(name: str, value: Any) -> Any:
    if name in _JSON:
        return json.dumps(value)
    # Half of a surrogate pair, which JSON can say, is no text for SQLite.
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


SUMMARY_COLUMNS = tuple(one.name for one in fields(RequestRecord) if one.name not in ("tenant", "detail", "trace"))
"""The columns that a list of requests shows."""


def summary_of(values: tuple[Any, ...]) -> dict[str, Any]:
    """Return a row of :data:`SUMMARY_COLUMNS` as clients see it."""
    row = dict(zip(SUMMARY_COLUMNS, values, strict=True))
    row |= {name: json.loads(row[name]) for name in _JSON}
    return row | {"object": "request", "stream": None if row["stream"] is None else bool(row["stream"])}


def packed(value: dict[str, Any] | None) -> bytes | None:
    """Return plain data as compressed JSON."""
    return None if value is None else zlib.compress(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def unpacked(data: bytes | None) -> dict[str, Any] | None:
    """Return what :func:`packed` has packed."""
    found: dict[str, Any] | None = None if data is None else json.loads(zlib.decompress(data))
    return found
