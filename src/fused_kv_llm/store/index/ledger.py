"""The ledger: where chunks are, how large they are, and how they are used.

This part of the index changes all the time. It has tables of its own, so that counting a use does not rewrite a row
that contains a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fused_kv_llm.store.index.database import Database
from fused_kv_llm.store.index.pins import NOT_PINNED
from fused_kv_llm.store.index.policies import Entry, Policy

__all__ = ["LEDGER_SCHEMA", "Ledger", "Place", "Uses", "Victim"]

LEDGER_SCHEMA = (
    # nbytes: the chunk's file and its sidecars, as long as they are on the disk.
    """CREATE TABLE places (
    key TEXT PRIMARY KEY,
    on_disk INTEGER NOT NULL,
    on_remote INTEGER NOT NULL,
    nbytes INTEGER NOT NULL,
    cost REAL NOT NULL,
    hits INTEGER NOT NULL,
    reuse REAL NOT NULL,
    used_s REAL NOT NULL,
    priority REAL NOT NULL
) STRICT, WITHOUT ROWID""",
    "CREATE INDEX places_priority ON places (priority, used_s) WHERE on_disk = 1",
    """CREATE TABLE sides (
    key TEXT NOT NULL,
    name TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    PRIMARY KEY (key, name)
) STRICT, WITHOUT ROWID""",
    "CREATE TABLE totals (name TEXT PRIMARY KEY, value REAL NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
)
_ABOUT = "identity:"
_COLUMNS = "nbytes, cost, hits, reuse, used_s"


class Place(NamedTuple):
    """Where a chunk's file is."""

    on_disk: bool
    on_remote: bool


class Victim(NamedTuple):
    """A chunk that may be evicted: its key, the bytes that this frees, and whether the remote tier has it."""

    key: str
    nbytes: int
    priority: float
    on_remote: bool


class Uses(NamedTuple):
    """How a chunk was used: number of uses, sum of their weights, seconds since the epoch of the last one."""

    times: int
    weight: float
    used_s: float


class Ledger:
    """Places, sizes and uses of chunks; thread-safe.

    Parameters
    ----------
    database : Database
        The index file.
    policy : callable
        Orders the chunks that may be evicted.
    """

    def __init__(self, database: Database, policy: Policy) -> None:
        self._database = database
        self._policy = policy

    def add(self, key: str, nbytes: int, cost: float, used_s: float, place: Place) -> None:
        """Add a chunk; inside a transaction."""
        entry = Entry(nbytes, cost, used=used_s)
        values = (key, *map(int, place), nbytes, cost, entry.hits, entry.reuse, used_s)
        with self._database.connection() as connection:
            priority = self._policy(entry, self.total("clock"))
            connection.execute("INSERT INTO places VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, priority))
            self._grow(nbytes * place.on_disk)

    def place(self, key: str) -> Place | None:
        """Return where a chunk is; None if it has no row."""
        with self._database.connection() as connection:
            found = connection.execute("SELECT on_disk, on_remote FROM places WHERE key = ?", (key,)).fetchone()
        return Place(bool(found[0]), bool(found[1])) if found is not None else None

    def move(self, key: str, place: Place, nbytes: int | None = None) -> None:
        """Change where a chunk is, and how many bytes it takes there; inside a transaction."""
        with self._database.connection() as connection:
            found = connection.execute("SELECT on_disk, nbytes FROM places WHERE key = ?", (key,)).fetchone()
            if found is None:
                return
            update = "UPDATE places SET on_disk = ?, on_remote = ?, nbytes = ? WHERE key = ?"
            takes = found[1] if nbytes is None else nbytes
            connection.execute(update, (*map(int, place), takes, key))
            self._grow(takes * place.on_disk - found[0] * found[1])

    def remove(self, keys: Iterable[str]) -> None:
        """Forget chunks and their sidecars; inside a transaction."""
        with self._database.connection() as connection:
            for key in keys:
                query = "DELETE FROM places WHERE key = ? RETURNING on_disk * nbytes"
                freed = connection.execute(query, (key,)).fetchall()
                connection.execute("DELETE FROM sides WHERE key = ?", (key,))
                if freed:
                    self._grow(-freed[0][0])

    def add_sidecar(self, key: str, name: str, nbytes: int) -> bool:
        """Count a chunk's sidecar, new or replaced; inside a transaction. False if the chunk has no row."""
        with self._database.connection() as connection:
            old = connection.execute("SELECT nbytes FROM sides WHERE key = ? AND name = ?", (key, name)).fetchone()
            more = nbytes - (old[0] if old else 0)
            update = "UPDATE places SET nbytes = nbytes + ? WHERE key = ? RETURNING on_disk"
            found = connection.execute(update, (more, key)).fetchall()
            if not found:
                return False
            connection.execute("INSERT OR REPLACE INTO sides VALUES (?, ?, ?)", (key, name, nbytes))
            self._grow(more * found[0][0])
        return True

    def drop_sidecar(self, key: str, name: str) -> None:
        """Forget a chunk's sidecar; inside a transaction."""
        with self._database.connection() as connection:
            query = "DELETE FROM sides WHERE key = ? AND name = ? RETURNING nbytes"
            freed = connection.execute(query, (key, name)).fetchall()
            if freed:
                update = "UPDATE places SET nbytes = nbytes - ? WHERE key = ? RETURNING on_disk"
                found = connection.execute(update, (freed[0][0], key)).fetchall()
                self._grow(-freed[0][0] * (found[0][0] if found else 1))

    def sidecars(self, key: str) -> dict[str, int]:
        """Return names and sizes of a chunk's sidecars."""
        with self._database.connection() as connection:
            return dict(connection.execute("SELECT name, nbytes FROM sides WHERE key = ?", (key,)).fetchall())

    def sidecars_named(self, beginning: str) -> dict[tuple[str, str], int]:
        """Return the sizes of all sidecars on the disk whose names have this beginning, by chunk and name."""
        with self._database.connection() as connection:
            query = (
                "SELECT sides.key, sides.name, sides.nbytes FROM sides JOIN places USING (key) "
                "WHERE on_disk = 1 AND substr(name, 1, ?) = ?"
            )
            found = connection.execute(query, (len(beginning), beginning)).fetchall()
        return {(key, name): nbytes for key, name, nbytes in found}

    def total(self, name: str) -> float:
        """Return ``"disk_nbytes"`` or ``"clock"``."""
        with self._database.connection() as connection:
            found = connection.execute("SELECT value FROM totals WHERE name = ?", (name,)).fetchone()
        return found[0] if found is not None else 0.0

    def remote_keys(self) -> set[str]:
        """Return the keys of all chunks that the remote tier has, as far as is known."""
        with self._database.connection() as connection:
            return {row[0] for row in connection.execute("SELECT key FROM places WHERE on_remote = 1")}

    def unpublished(self) -> list[str]:
        """Return the keys of all chunks on the disk that the remote tier lacks, or lacks a sidecar of."""
        with self._database.connection() as connection:
            query = "SELECT key FROM places WHERE on_disk = 1 AND on_remote = 0 ORDER BY key"
            return [row[0] for row in connection.execute(query)]

    def recount(self) -> None:
        """Sum the chunks' bytes anew; inside a transaction."""
        with self._database.connection() as connection:
            query = "SELECT coalesce(sum(nbytes), 0) FROM places WHERE on_disk = 1"
            self._set("disk_nbytes", connection.execute(query).fetchone()[0])

    def advance_clock(self, priority: float) -> None:
        """Advance the clock to the priority of an evicted chunk (RAGCache equation 3); inside a transaction."""
        self._set("clock", max(priority, self.total("clock")))

    def victims(self, limit: int) -> list[Victim]:
        """Return the chunks on the disk that should go first; those that are pinned do not go."""
        with self._database.connection() as connection:
            found = connection.execute(
                f"SELECT key, nbytes, priority, on_remote FROM places WHERE on_disk = 1 AND {NOT_PINNED} "
                "ORDER BY priority, used_s LIMIT ?",
                (limit,),
            ).fetchall()
        return [Victim(key, nbytes, priority, bool(remote)) for key, nbytes, priority, remote in found]

    def count(self, uses: Mapping[str, Uses]) -> None:
        """Record uses of chunks, and update their priorities; inside a transaction."""
        clock = self.total("clock")
        with self._database.connection() as connection:
            for key, use in uses.items():
                found = connection.execute(f"SELECT {_COLUMNS} FROM places WHERE key = ?", (key,)).fetchone()
                if found is None:
                    continue
                entry = Entry(*found).touched(use.used_s, use.weight, use.times)
                update = "UPDATE places SET hits = ?, reuse = ?, used_s = ?, priority = ? WHERE key = ?"
                priority = self._policy(entry, clock)
                connection.execute(update, (entry.hits, entry.reuse, entry.used, priority, key))

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add to the counters of all processes; inside a transaction."""
        for name, number in counts.items():
            self._set(name, self.total(name) + number)

    def counts(self) -> dict[str, float]:
        """Return what all processes have counted since the index was made."""
        with self._database.connection() as connection:
            return dict(connection.execute("SELECT name, value FROM totals").fetchall())

    def describe(self, identity: str, about: str) -> None:
        """Keep what people call an identity."""
        with self._database.connection() as connection:
            known = "SELECT 1 FROM settings WHERE name = ? AND value = ?"
            if connection.execute(known, (_ABOUT + identity, about)).fetchone() is None:
                connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (_ABOUT + identity, about))

    def descriptions(self) -> dict[str, str]:
        """Return the readable names of identities."""
        with self._database.connection() as connection:
            query = "SELECT substr(name, ?), value FROM settings WHERE substr(name, 1, ?) = ?"
            return dict(connection.execute(query, (len(_ABOUT) + 1, len(_ABOUT), _ABOUT)).fetchall())

    def hottest(self, limit: int) -> list[tuple[str, int]]:
        """Return the most used chunks and their numbers of uses, ingestion included."""
        with self._database.connection() as connection:
            query = "SELECT key, hits FROM places ORDER BY hits DESC, used_s DESC LIMIT ?"
            return connection.execute(query, (limit,)).fetchall()

    def standings(self, keys: Sequence[str]) -> dict[str, tuple[bool, int, float]]:
        """Return by key whether a chunk is on the disk, how often it was used, and when last, in seconds since 1970."""
        rows = self._database.select_in("SELECT key, on_disk, hits - 1, used_s FROM places WHERE key", keys)
        return {key: (bool(on_disk), uses, used_s) for key, on_disk, uses, used_s in rows}

    def tiers(self) -> dict[str, tuple[int, int]]:
        """Return number of chunks and their bytes, by tier; a chunk can be in two."""
        with self._database.connection() as connection:
            query = "SELECT count(*), coalesce(sum(nbytes), 0) FROM places WHERE {} = 1"
            return {name: connection.execute(query.format(f"on_{name}")).fetchone() for name in ("disk", "remote")}

    def sidecar_tiers(self) -> dict[str, tuple[int, int]]:
        """Return number of sidecars and their bytes, by their chunks' tiers; they can be in two."""
        with self._database.connection() as connection:
            query = "SELECT count(*), coalesce(sum(sides.nbytes), 0) FROM sides JOIN places USING (key) WHERE {} = 1"
            return {name: connection.execute(query.format(f"on_{name}")).fetchone() for name in ("disk", "remote")}

    def _grow(self, nbytes: float) -> None:
        self._set("disk_nbytes", self.total("disk_nbytes") + nbytes)

    def _set(self, name: str, value: float) -> None:
        with self._database.connection() as connection:
            connection.execute("INSERT OR REPLACE INTO totals VALUES (?, ?)", (name, value))
