"""The store's index: which chunks there are.

Nothing in the index is trusted: a key from it becomes part of a path only after ``check_key``, and a chunk's token ids
are compared with its file's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fused_kv_llm.chunk import ContentHash
from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.store.format import KEY_VARIABLE, Cipher
from fused_kv_llm.store.index.database import Database
from fused_kv_llm.store.index.departures import Departure, Departures
from fused_kv_llm.store.index.ledger import LEDGER_SCHEMA, Ledger
from fused_kv_llm.store.index.pins import Pins
from fused_kv_llm.store.index.policies import Policy
from fused_kv_llm.store.index.records import Records
from fused_kv_llm.store.index.remote_marks import RemoteMarks
from fused_kv_llm.store.index.rows import ChunkRow, ContentRows, IdentityTotals

__all__ = ["ChunkIndex"]

_HASHES_AT_ONCE = 100_000
_HEX_KEY = "length(key) = 64 AND key NOT GLOB '*[^0-9a-f]*'"
_SCHEMA = (
    f"""CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE CHECK ({_HEX_KEY}),
    identity TEXT NOT NULL,
    position INTEGER NOT NULL,
    nbytes INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    prefix_hash INTEGER NOT NULL,
    full_hash INTEGER NOT NULL,
    length INTEGER NOT NULL,
    text BLOB NOT NULL,
    token_ids BLOB NOT NULL
) STRICT""",
    # Covers content_hashes(), keys() and totals(), so that neither reads the texts.
    """CREATE INDEX chunks_content ON chunks
    (identity, id, prefix_hash, full_hash, length, key, num_tokens, nbytes)""",
    *LEDGER_SCHEMA,
)
_INSERT = """INSERT INTO chunks
    (key, identity, position, nbytes, num_tokens, prefix_hash, full_hash, length, text, token_ids)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""


class ChunkIndex:
    """The index file of a store; thread-safe and shared between processes.

    Parameters
    ----------
    path : Path
        The SQLite file; created unless ``read_only``.
    policy : callable
        Orders the chunks that may be evicted.
    cipher : Cipher or None
        Encrypts texts, token ids and content hashes.
    read_only : bool
        Change nothing.

    Raises
    ------
    StoreUnavailableError
        The file is damaged, is not such an index, cannot be opened, or is encrypted with another key.
    """

    def __init__(self, path: Path, policy: Policy, cipher: Cipher | None, *, read_only: bool) -> None:
        self._cipher = cipher
        self._database = Database(path, _SCHEMA, read_only=read_only)
        self.ledger = Ledger(self._database, policy)
        self.records = Records(self._database, cipher)
        self.departures = Departures(self._database)
        self.pins = Pins(self._database)
        self.remote_marks = RemoteMarks(self._database)
        try:
            self._check_cipher(path, read_only=read_only)
        except BaseException:
            self._database.close()
            raise

    def _check_cipher(self, path: Path, *, read_only: bool) -> None:
        mine = self._cipher.check if self._cipher is not None else "none"
        with self._database.connection() as connection:
            if not read_only:
                connection.execute("INSERT OR IGNORE INTO settings VALUES ('encryption', ?)", (mine,))
            found = connection.execute("SELECT value FROM settings WHERE name = 'encryption'").fetchone()
        theirs = found[0] if found is not None else mine
        if theirs == mine:
            return
        if mine == "none":
            raise StoreUnavailableError(
                f"The store in {path.parent} is encrypted: give its encryption_key, or set {KEY_VARIABLE}."
            )
        state = "is not encrypted" if theirs == "none" else "was encrypted with another key"
        raise StoreUnavailableError(
            f"The store in {path.parent} {state}, so encryption_key does not open it. Give the right key (or none, "
            f"and unset {KEY_VARIABLE}), or set kv_dir to another folder."
        )

    def transaction(self) -> AbstractContextManager[None]:
        """Keep every other thread and process from writing, so that a chunk's file and its row change together."""
        return self._database.transaction()

    def add(self, row: ChunkRow, content: ContentHash) -> None:
        """Add a row for a chunk that has none; inside a transaction that has checked it."""
        prefix, full = self._hashes([(content.prefix, content.full)], seal=True)[0]
        hashes = _signed(int(prefix)), _signed(int(full)), content.length
        place = row.position, row.nbytes, len(row.token_ids)
        texts = self._seal(row.key, row.text.encode(), np.array(row.token_ids, dtype="<i4").tobytes())
        with self._database.connection() as connection:
            connection.execute(_INSERT, (row.key, row.identity, *place, *hashes, *texts))
        self.departures.forget(row.key)

    def present(self, keys: Iterable[str]) -> set[str]:
        """Return those keys that have a row."""
        return {row[0] for row in self._select("key", list(keys))}

    def rows(self, keys: Iterable[str]) -> tuple[dict[str, ChunkRow], list[str]]:
        """Return the rows of those keys that have one, and the keys of rows that cannot be decoded."""
        found, damaged = self._decoded(list(keys), "key")
        return {row.key: row for _, row in found}, damaged

    def rows_by_rowid(self, rowids: Iterable[int]) -> tuple[dict[int, ChunkRow], list[str]]:
        """Return the rows with these rowids, and the keys of rows that cannot be decoded."""
        found, damaged = self._decoded(list(rowids), f"{_HEX_KEY} AND id")
        return dict(found), damaged

    def content_hashes(self, identity: str, after_rowid: int) -> ContentRows | None:
        """Return content hashes of an identity's next chunks after a ``rowid``; None if there are none."""
        with self._database.connection() as connection:
            found = connection.execute(
                "SELECT id, prefix_hash, full_hash, length FROM chunks "
                f"WHERE identity = ? AND id > ? AND {_HEX_KEY} ORDER BY id LIMIT {_HASHES_AT_ONCE}",
                (identity, after_rowid),
            )
            try:
                table = np.fromiter(found, dtype=np.dtype([(name, np.int64) for name in ContentRows._fields]))
            except (ValueError, TypeError, OverflowError) as error:
                raise self._database.error(error) from error
        if len(table) == 0:
            return None
        pairs = np.stack([table["prefix"], table["full"]], axis=1).view(np.uint64)
        hashes = self._hashes(pairs, seal=False)
        return ContentRows(table["rowid"].copy(), hashes[:, 0].copy(), hashes[:, 1].copy(), table["length"].copy())

    def keys(self, identity: str, after_rowid: int = 0) -> list[str]:
        """Return the keys of an identity's chunks with a greater ``rowid``, ascending by it."""
        query = f"SELECT key FROM chunks WHERE identity = ? AND id > ? AND {_HEX_KEY} ORDER BY id"
        with self._database.connection() as connection:
            return [row[0] for row in connection.execute(query, (identity, after_rowid))]

    def keys_up_to(self, identity: str, key: str) -> list[str]:
        """Return an identity's keys up to a certain one, ascending."""
        # The plus keeps SQLite from going through all keys of the identity.
        query = f"SELECT key FROM chunks WHERE key <= ? AND +identity = ? AND {_HEX_KEY} ORDER BY key"
        with self._database.connection() as connection:
            return [row[0] for row in connection.execute(query, (key, identity))]

    def keys_without_sidecar(self, identity: str, name: str) -> list[str]:
        """Return the keys of one identity's chunks that have no sidecar of that name."""
        with self._database.connection() as connection:
            found = connection.execute(
                f"SELECT key FROM chunks WHERE identity = ? AND {_HEX_KEY} AND NOT EXISTS "
                "(SELECT 1 FROM sides WHERE sides.key = chunks.key AND sides.name = ?) ORDER BY id",
                (identity, name),
            ).fetchall()
        return [row[0] for row in found]

    def hashes(self, key: str) -> ContentHash | None:
        """Return the content hashes of a chunk's row; None if there is no row."""
        for prefix, full, length in self._select("prefix_hash, full_hash, length", [key]):
            table = np.array([(prefix, full)], dtype=np.int64).view(np.uint64)
            opened = self._hashes(table, seal=False)[0]
            return ContentHash(int(opened[0]), int(opened[1]), length)
        return None

    def holding(self, content: ContentHash, identities: Sequence[str]) -> set[str]:
        """Return those identities that have a row with these content hashes."""
        pair = self._hashes([(content.prefix, content.full)], seal=True)[0]
        wanted = _signed(int(pair[0])), _signed(int(pair[1])), content.length
        query = (
            "SELECT 1 FROM chunks INDEXED BY chunks_content "
            "WHERE identity = ? AND prefix_hash = ? AND full_hash = ? AND length = ? LIMIT 1"
        )
        with self._database.connection() as connection:
            return {one for one in identities if connection.execute(query, (one, *wanted)).fetchone() is not None}

    def all_keys(self, after: str = "") -> list[tuple[str, int]]:
        """Return keys and file sizes of at most a thousand chunks, ascending, from a key on."""
        with self._database.connection() as connection:
            return connection.execute(
                f"SELECT key, nbytes FROM chunks WHERE key > ? AND {_HEX_KEY} ORDER BY key LIMIT 1000", (after,)
            ).fetchall()

    def remove(self, keys: Iterable[str], why: Departure | None = None) -> set[str]:
        """Delete rows, and note why if that may be asked; returns the keys that had one."""
        wanted = list(keys)
        delete = "DELETE FROM chunks WHERE key = ?"
        with self._database.connection() as connection:
            removed = {key for key in wanted if connection.execute(delete, (key,)).rowcount == 1}
        self.ledger.remove(wanted)
        if why is not None:
            self.departures.add(removed, why)
        return removed

    def totals(self) -> list[IdentityTotals]:
        """Return the totals of every identity, the one with most chunks first."""
        names = self.ledger.descriptions()
        with self._database.connection() as connection:
            found = connection.execute(
                """SELECT identity, count(*), sum(num_tokens), sum(chunks.nbytes), total(on_disk),
                    total(on_disk * places.nbytes), total(on_remote), total(on_remote * places.nbytes)
                FROM chunks LEFT JOIN places USING (key) GROUP BY identity ORDER BY count(*) DESC"""
            ).fetchall()
            named = connection.execute(
                "SELECT identity, name, count(*) FROM sides JOIN chunks USING (key) GROUP BY identity, name"
            ).fetchall()
        sidecars: dict[str, dict[str, int]] = {}
        for identity, name, count in named:
            sidecars.setdefault(identity, {})[name] = count
        return [
            IdentityTotals._make((identity, names.get(identity, ""), *map(int, numbers), sidecars.get(identity, {})))
            for identity, *numbers in found
        ]

    def compact(self) -> None:
        """Give free pages of the index file back to the disk."""
        with self._database.connection() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("VACUUM")

    def close(self) -> None:
        """Close the index, after calls in flight have ended."""
        self._database.close()

    def _select(self, columns: str, keys: Sequence[str | int], by: str = "key") -> Iterator[tuple[Any, ...]]:
        return iter(self._database.select_in(f"SELECT {columns} FROM chunks WHERE {by}", keys))

    def _seal(self, key: str, *columns: bytes) -> list[bytes]:
        if self._cipher is None:
            return list(columns)
        return [self._cipher.seal_row(data, f"{key}|{number}".encode()) for number, data in enumerate(columns)]

    def _open(self, key: str, *columns: bytes) -> list[bytes]:
        if self._cipher is None:
            return list(columns)
        return [self._cipher.open_row(data, f"{key}|{number}".encode()) for number, data in enumerate(columns)]

    def _hashes(self, pairs: npt.ArrayLike, *, seal: bool) -> npt.NDArray[np.uint64]:
        table = np.asarray(pairs, dtype=np.uint64).reshape(-1, 2)
        if self._cipher is None:
            return table
        return self._cipher.seal_hashes(table) if seal else self._cipher.open_hashes(table)

    def _decoded(self, values: Sequence[str | int], by: str) -> tuple[list[tuple[int, ChunkRow]], list[str]]:
        """Return rowids and rows, and the keys of rows that cannot be decoded."""
        rows: list[tuple[int, ChunkRow]] = []
        damaged: list[str] = []
        columns = "id, key, identity, text, token_ids, position, nbytes"
        for rowid, key, identity, text, ids, position, nbytes in self._select(columns, values, by):
            try:
                texts = self._open(key, text, ids)
                token_ids = tuple(np.frombuffer(texts[1], dtype="<i4").tolist())
                rows.append((rowid, ChunkRow(key, identity, texts[0].decode(), token_ids, position, nbytes)))
            except (ValueError, TypeError, AttributeError):
                damaged.append(key)
        return rows, damaged


def _signed(number: int) -> int:
    """Map an unsigned 64-bit number to the signed one with the same bits, which SQLite can hold."""
    return number - (1 << 64) if number >= 1 << 63 else number
