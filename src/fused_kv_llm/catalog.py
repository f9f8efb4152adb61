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

        def text_of(keys: Sequence[str]) -> dict[str, str]:
            found = self._store.rows(keys)
            rows.update(found)
            # A key without a row was deleted since it was indexed.
            self._index.remove([key for key in keys if key not in found])
            return {key: row.text for key, row in found.items()}

        matches = [match for match in self._index.find(text, text_of) if match.key in rows]
        return matches, rows

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
        keys = self._index.lookup([content_hash(text) for text in wanted])
        rows = self._store.rows([key for found in keys for key in found])
        of_text = {
            text: [rows[key] for key in found if key in rows and rows[key].text == text]
            for text, found in zip(wanted, keys, strict=True)
        }
        return {text: found for text, found in of_text.items() if found}

    def all_rows(self) -> list[ChunkRow]:
        """Return the rows of every stored chunk of this identity."""
        _, keys = self._store.content_rows(self._identity, 0)
        rows = self._store.rows(keys)
        return [rows[key] for key in keys if key in rows]

    def _refresh(self) -> None:
        with self._lock:
            (rowids, prefix, full, length), keys = self._store.content_rows(self._identity, self._last_rowid)
            if keys:
                self._index.add(keys, prefix, full, length)
                self._last_rowid = int(rowids[-1])
