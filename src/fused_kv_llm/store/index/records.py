"""Records: a few small pieces of data that belong to a store as a whole, sealed as its rows are."""

from __future__ import annotations

import base64
import binascii

import xxhash

from fused_kv_llm.store.format import Cipher
from fused_kv_llm.store.index.database import Database

__all__ = ["Records"]

_CHECK_NBYTES = 16


class Records:
    """Named data in an index; thread-safe, and shared between processes.

    Parameters
    ----------
    database : Database
        The index file.
    cipher : Cipher or None
        Encrypts the data; their names are not encrypted.
    """

    def __init__(self, database: Database, cipher: Cipher | None) -> None:
        self._database = database
        self._cipher = cipher

    def read(self, name: str) -> bytes | None:
        """Return a record; None if there is none.

        Raises
        ------
        ValueError
            It is damaged.
        """
        with self._database.connection() as connection:
            found = connection.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        if found is None:
            return None
        try:
            data = base64.b64decode(found[0], validate=True)
        except (binascii.Error, TypeError) as error:
            raise ValueError("it is not what was written") from error
        if self._cipher is not None:
            data = self._cipher.open_row(data, name.encode())
        if xxhash.xxh3_128_digest(data[_CHECK_NBYTES:]) != data[:_CHECK_NBYTES]:
            raise ValueError("its checksum does not match")
        return data[_CHECK_NBYTES:]

    def add(self, name: str, data: bytes) -> None:
        """Write a record, unless there is one of that name."""
        checked = xxhash.xxh3_128_digest(data) + data
        sealed = checked if self._cipher is None else self._cipher.seal_row(checked, name.encode())
        with self._database.connection() as connection:
            text = base64.b64encode(sealed).decode()
            connection.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", (name, text))

    def names(self, beginning: str) -> list[str]:
        """Return the names of the records that begin so."""
        with self._database.connection() as connection:
            query = "SELECT name FROM settings WHERE substr(name, 1, ?) = ? ORDER BY name"
            return [row[0] for row in connection.execute(query, (len(beginning), beginning))]

    def remove(self, name: str) -> None:
        """Delete a record, if there is one."""
        with self._database.connection() as connection:
            connection.execute("DELETE FROM settings WHERE name = ?", (name,))
