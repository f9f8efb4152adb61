"""Pins: chunks that are not evicted from the disk, and for whose sake.

They are kept among the settings of the index, so that stores of earlier releases have room for them too; those releases
do not heed them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from fused_kv_llm.store.index.database import Database

__all__ = ["NOT_PINNED", "Pins"]

_ABOUT, _AFTER = "pin:", "pin;"  # The name after all that begin so.

NOT_PINNED = "NOT EXISTS (SELECT 1 FROM settings WHERE name > 'pin:' || key || ':' AND name < 'pin:' || key || ';')"
"""An SQL condition on rows with a ``key``."""


class Pins:
    """Who holds which chunks; thread-safe, and shared between processes.

    Parameters
    ----------
    database : Database
        The index file.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, keys: Iterable[str], holder: str) -> None:
        """Pin chunks, stored or not, for a holder; inside a transaction."""
        rows = [(f"{_ABOUT}{key}:{holder}", holder) for key in keys]
        with self._database.connection() as connection:
            connection.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", rows)

    def remove(self, holder: str) -> None:
        """Forget what a holder has pinned; inside a transaction."""
        with self._database.connection() as connection:
            delete = "DELETE FROM settings WHERE name > ? AND name < ? AND value = ?"
            connection.execute(delete, (_ABOUT, _AFTER, holder))

    def of(self, keys: Sequence[str]) -> set[str]:
        """Return those of some chunks that are pinned."""
        found = set[str]()
        with self._database.connection() as connection:
            for key in keys:
                query = "SELECT 1 FROM settings WHERE name > ? AND name < ? LIMIT 1"
                if connection.execute(query, (f"{_ABOUT}{key}:", f"{_ABOUT}{key};")).fetchone() is not None:
                    found.add(key)
        return found

    def nbytes(self, identities: Iterable[str], keys: Iterable[str]) -> int:
        """Return what the pinned chunks of some identities take, and with them further ones of theirs."""
        query = """WITH held AS (SELECT substr(name, 5, 64) AS key FROM settings WHERE name > ? AND name < ?
                UNION SELECT value FROM json_each(?))
            SELECT coalesce(sum(places.nbytes), 0) FROM held JOIN places USING (key) JOIN chunks USING (key)
            WHERE identity IN (SELECT value FROM json_each(?))"""
        values = _ABOUT, _AFTER, json.dumps(list(keys)), json.dumps(list(identities))
        with self._database.connection() as connection:
            return int(connection.execute(query, values).fetchone()[0])

    def holders(self) -> set[str]:
        """Return everybody who has pinned something."""
        with self._database.connection() as connection:
            query = "SELECT DISTINCT value FROM settings WHERE name > ? AND name < ?"
            return {holder for (holder,) in connection.execute(query, (_ABOUT, _AFTER))}
