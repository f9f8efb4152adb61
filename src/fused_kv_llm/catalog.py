"""The chunks of one identity, found in a prompt's text: the store's rows behind the content index."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from fused_kv_llm.prompt import ContentIndex, Match, content_hash, is_indexable
from fused_kv_llm.store import ChunkRow, KVStore

__all__ = ["ChunkCatalog"]


class ChunkCatalog:
    """Keeps a content index in step with a store that other threads and processes write to.

    Parameters
    ----------
    store : KVStore
    identity : str
        Only chunks of this identity are found.
    """

    def __init__(self, store: KVStore, identity: str) -> None:
        self._store = store
        self._identity = identity
        self._index = ContentIndex()
        self._last_rowid = 0
        self._lock = threading.Lock()

    def find(self, text: str) -> tuple[list[Match], dict[str, ChunkRow]]:
        """Return where stored chunks stand in `text`, and their rows.

        Parameters
        ----------
        text : str
            A rendered prompt.

        Returns
        -------
        list of Match
            Ascending, not overlapping.
        dict of str to ChunkRow
            The rows of the chunks that matched.
        """
        self._refresh()
        rows: dict[str, ChunkRow] = {}

        keys: dict[int, str] = {}

        def text_of(rowids: Sequence[int]) -> dict[int, str]:
            found = self._store.rows_by_rowid(rowids)
            rows.update((row.key, row) for row in found.values())
            keys.update((rowid, row.key) for rowid, row in found.items())
            # What has no row was deleted since it was indexed.
            self._index.remove([rowid for rowid in rowids if rowid not in found])
            return {rowid: row.text for rowid, row in found.items()}

        return [Match(keys[rowid], start, end) for rowid, start, end in self._index.find(text, text_of)], rows

    def rows_of(self, texts: Sequence[str]) -> dict[str, list[ChunkRow]]:
        """Return the rows of whole chunks, by their text.

        Parameters
        ----------
        texts : sequence of str
            Without surrounding white space, as they are stored.

        Returns
        -------
        dict of str to list of ChunkRow
            Only texts that are stored. A text has two rows while its KV is being replaced.
        """
        self._refresh()
        wanted = [text for text in texts if is_indexable(text)]
        rowids = self._index.lookup([content_hash(text) for text in wanted])
        rows = self._store.rows_by_rowid([rowid for found in rowids for rowid in found])
        of_text = {
            text: [rows[rowid] for rowid in found if rowid in rows and rows[rowid].text == text]
            for text, found in zip(wanted, rowids, strict=True)
        }
        return {text: found for text, found in of_text.items() if found}

    def rows_like(self, text: str, limit: int = 500) -> list[ChunkRow]:
        """Return rows of chunks that may be another form of a text.

        Parameters
        ----------
        text : str
        limit : int
            The most chunks: those that begin alike, and the newest of a similar length.

        Returns
        -------
        list of ChunkRow
        """
        if not is_indexable(text):
            return []
        self._refresh()
        rowids = self._index.similar(content_hash(text), limit)
        rows = self._store.rows_by_rowid(rowids)
        return [rows[rowid] for rowid in rowids if rowid in rows]

    def keys(self) -> list[str]:
        """Return the keys of every stored chunk of this identity."""
        return self._store.keys(self._identity)

    def all_rows(self) -> list[ChunkRow]:
        """Return the rows of every stored chunk of this identity."""
        keys = self.keys()
        rows = self._store.rows(keys)
        return [rows[key] for key in keys if key in rows]

    def _refresh(self) -> None:
        with self._lock:
            for rowids, prefix, full, length in self._store.content_hashes(self._identity, self._last_rowid):
                self._index.add(rowids, prefix, full, length)
                self._last_rowid = int(rowids[-1])
