"""How long requests are remembered: until they are too old, or too many bytes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

__all__ = ["retain"]

_ROW_BYTES = 600
"""What a row takes beside its texts and reports: its columns, and its places in the indexes."""

_CUT = """DELETE FROM requests WHERE number IN (
    SELECT number FROM (
        SELECT number, sum(nbytes + :row) OVER (PARTITION BY tenant ORDER BY number DESC) AS newer FROM requests
    ) WHERE newer > :share
)"""


def retain(connection: sqlite3.Connection, since_s: float, max_bytes: int) -> int:
    """Delete what is too old, and what is more than fits, and give its space back.

    Of the bytes each tenant has the same share, as far as it needs it: nobody's requests push out those of others.

    Parameters
    ----------
    connection : sqlite3.Connection
    since_s : float
        Seconds since 1970; older requests go.
    max_bytes : int
        Of all that stay.

    Returns
    -------
    int
        How many requests went.
    """
    gone = connection.execute("DELETE FROM requests WHERE created_s < ?", (since_s,)).rowcount
    query = "SELECT sum(nbytes + ?) FROM requests GROUP BY tenant"
    used = [nbytes for (nbytes,) in connection.execute(query, (_ROW_BYTES,))]
    if sum(used) > max_bytes:
        share = _share(used, max_bytes)
        gone += connection.execute(_CUT, {"row": _ROW_BYTES, "share": share}).rowcount
    if gone:
        # It gives one page back with every step, and `execute` takes only the first.
        connection.executescript("PRAGMA incremental_vacuum")
        # What was deleted is in the write-ahead log until then, and texts are not to outlive their requests.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return gone


def _share(used: Iterable[int], max_bytes: int) -> int:
    """Return the most that one may have so that all fit, when those who need less take no more than that."""
    left, waiting = max_bytes, sorted(used)
    while waiting and waiting[0] * len(waiting) <= left:
        left -= waiting.pop(0)
    return left // len(waiting) if waiting else max_bytes
