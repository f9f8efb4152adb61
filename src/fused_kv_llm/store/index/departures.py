"""Departures: why chunks that were stored are not any more, for as long as that is likely to be asked.

They are kept among the settings of the index, so that stores of earlier releases have room for them too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Literal

from fused_kv_llm.store.index.database import Database

__all__ = ["Departure", "Departures"]

Departure = Literal["evicted", "deleted", "damaged"]

_ABOUT = "gone:"
_AFTER = "gone;"  # The name after all that begin so.


class Departures:
    """The newest departures of chunks, by key; thread-safe, and shared between processes.

    Parameters
    ----------
    database : Database
        The index file.
    limit : int
        How many are kept. Each process lets a tenth more come together before it drops the oldest.
    """

    def __init__(self, database: Database, limit: int = 10_000) -> None:
        self._database = database
        self._limit = limit
        self._until_sweep = 0

    def add(self, keys: Iterable[str], why: Departure) -> None:
        """Note why chunks have gone; inside a transaction."""
        rows = [(_ABOUT + key, f"{time.time():018.6f} {why}") for key in keys]
        if not rows:
            return
        with self._database.connection() as connection:
            connection.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", rows)
        self._until_sweep -= len(rows)
        if self._until_sweep < 0:
            self._sweep()
            self._until_sweep = self._limit // 10

    def forget(self, key: str) -> None:
        """Forget that a chunk has gone, since it is stored again; inside a transaction."""
        with self._database.connection() as connection:
            connection.execute("DELETE FROM settings WHERE name = ?", (_ABOUT + key,))

    def of(self, keys: Sequence[str]) -> dict[str, str]:
        """Return why chunks have gone; those of which that is not known are left out."""
        names = [_ABOUT + key for key in keys]
        rows = self._database.select_in("SELECT name, value FROM settings WHERE name", names)
        return {name.removeprefix(_ABOUT): value.rpartition(" ")[2] for name, value in rows}

    def _sweep(self) -> None:
        with self._database.connection() as connection:
            # Values begin with the time, in a fixed number of digits.
            connection.execute(
                "DELETE FROM settings WHERE name IN (SELECT name FROM settings WHERE name > ? AND name < ? "
                "ORDER BY value DESC LIMIT -1 OFFSET ?)",
                (_ABOUT, _AFTER, self._limit),
            )
