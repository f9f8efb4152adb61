"""What an index remembers of the remote tier: which one it was, and which versions of sidecars it knows.

It is kept among the settings of the index, so that stores of earlier releases have room for it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fused_kv_llm.store.index.database import Database

__all__ = ["RemoteMarks"]

_TIER = "remote tier"
_SEEN = "seen:"
_AFTER = "seen;"  # The name after all that begin so.


class RemoteMarks:
    """Marks of the remote tier; thread-safe, and shared between processes.

    Parameters
    ----------
    database : Database
        The index file.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def swap_tier(self, tier: str) -> str | None:
        """Remember which tier it is, and return which it was; None if none was known. Inside a transaction."""
        with self._database.connection() as connection:
            found = connection.execute("SELECT value FROM settings WHERE name = ?", (_TIER,)).fetchone()
            if found is None or found[0] != tier:
                connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (_TIER, tier))
        return None if found is None else str(found[0])

    def seen(self) -> dict[str, str]:
        """Return the versions of objects, by name, that what is on the disk is not older than."""
        query = "SELECT substr(name, ?), value FROM settings WHERE name > ? AND name < ?"
        with self._database.connection() as connection:
            return dict(connection.execute(query, (len(_SEEN) + 1, _SEEN, _AFTER)).fetchall())

    def note(self, versions: Mapping[str, str]) -> None:
        """Remember versions of objects; inside a transaction."""
        rows = [(_SEEN + name, version) for name, version in versions.items()]
        with self._database.connection() as connection:
            connection.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", rows)

    def forget(self, names: Iterable[str]) -> None:
        """Forget versions of objects; inside a transaction."""
        with self._database.connection() as connection:
            connection.executemany("DELETE FROM settings WHERE name = ?", [(_SEEN + name,) for name in names])
