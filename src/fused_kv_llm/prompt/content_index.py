"""Finds stored chunks inside a text, by content.

The index knows of each chunk only its key, the hash of its first ``WINDOW`` characters, the hash of its
whole text and its length: at most 36 bytes besides the key. A text is scanned in three steps:

1. every window of ``WINDOW`` characters is looked up among the chunks' prefix hashes;
2. for each hit, and each distinct length known for that prefix, the hash of the span of that length is
   looked up among the chunks' full hashes;
3. what is left is compared character by character with the chunk's text.

The second step costs (hits) x (distinct lengths of the prefix): small also when all chunks share a long
header, large only when that prefix recurs at thousands of places in one prompt. It runs in blocks of
bounded memory either way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..chunk import ContentHash
from ..errors import ConfigError
from .cover import best_cover
from .hash_table import HashTable
from .texthash import WINDOW, SpanHashes, content_hash, is_indexable

__all__ = ["WINDOW", "ContentIndex", "Match", "content_hash", "is_indexable"]

_PENDING_BATCHES = 256

_Columns = tuple[list[str], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class Match:
    """A chunk found in a text.

    Parameters
    ----------
    key : str
        The chunk's key.
    start, end : int
        Half-open span of characters that equals the chunk's text.
    """

    key: str
    start: int
    end: int


class ContentIndex:
    """Index over the texts of stored chunks; thread-safe.

    Additions are collected and sorted at the next search, into tables of geometrically growing size, so
    that adding n chunks one by one, with searches between, costs O(n log^2 n) in all. Removed keys are
    skipped at once and swept out when they are many.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[_Columns] = []
        self._tables: tuple[HashTable, ...] = ()
        self._dead: set[str] = set()

    def __len__(self) -> int:
        """Rows held, with those that wait to be swept out."""
        with self._lock:
            return self._rows_held()

    def add(self, keys: Sequence[str], prefix: ArrayLike, full: ArrayLike, length: ArrayLike) -> None:
        """Add chunks; a key that is already there with the same hash is kept once.

        Parameters
        ----------
        keys : sequence of str
            Keys of the chunks.
        prefix, full : array_like of uint64
            ``[n]``, hashes as ``content_hash`` computes them.
        length : array_like of int
            ``[n]``, lengths of the texts in characters, below 2**32.

        Raises
        ------
        ConfigError
            If the arrays differ in length.
        """
        columns = (
            np.array(prefix, dtype=np.uint64),
            np.array(full, dtype=np.uint64),
            np.array(length, dtype=np.uint32),
        )
        if any(column.shape != (len(keys),) for column in columns):
            shapes = ", ".join(str(column.shape) for column in columns)
            raise ConfigError(
                f"Expected a prefix, a full hash and a length for each of {len(keys)} keys, got {shapes}."
            )
        if len(keys) == 0:
            return
        with self._lock:
            self._pending.append((list(keys), *columns))
            self._dead.difference_update(keys)
            if len(self._pending) >= _PENDING_BATCHES:
                self._flush()

    def remove(self, keys: Sequence[str]) -> None:
        """Forget chunks; unknown keys are ignored.

        Parameters
        ----------
        keys : sequence of str
            Keys of the chunks.
        """
        with self._lock:
            self._dead.update(keys)
            # Keys are not checked when they are removed (that would take a dictionary of all of them), so
            # unknown ones count too until the sweep.
            if 4 * len(self._dead) >= self._rows_held():
                self._flush()
                self._tables = tuple(kept for table in self._tables if (kept := table.without(self._dead)).keys)
                self._dead = set()

    def find(self, text: str, text_of: Callable[[Sequence[str]], Mapping[str, str]]) -> list[Match]:
        """Find stored chunks in a text.

        Parameters
        ----------
        text : str
            The text to search, for example a rendered prompt.
        text_of : callable
            Given keys, returns the texts of those it knows. It is called at most once, with the keys whose
            hashes agree, and outside the index's lock.

        Returns
        -------
        list of Match
            Non-overlapping, ascending, covering as many characters as possible, by as few chunks as
            possible. When several keys share a text, any one of them whose text was returned is used.
        """
        with self._lock:
            self._flush()
            tables = self._tables
        if not tables or not is_indexable(text):
            return []
        hashes = SpanHashes(text)
        windows = hashes.windows()
        candidates = [found for table in tables for found in table.candidates(hashes, windows)]
        with self._lock:
            candidates = [found for found in candidates if found[0] not in self._dead]
        if not candidates:
            return []
        texts = text_of(list(dict.fromkeys(key for key, _, _ in candidates)))
        verified: dict[tuple[int, int], str] = {}
        for key, start, end in candidates:
            if (start, end) not in verified and texts.get(key) == text[start:end]:
                verified[start, end] = key
        spans = list(verified)
        return [Match(verified[spans[i]], *spans[i]) for i in best_cover(spans)]

    def lookup(self, contents: Sequence[ContentHash]) -> list[list[str]]:
        """Find chunks by the hashes of their whole text.

        Parameters
        ----------
        contents : sequence of ContentHash

        Returns
        -------
        list of list of str
            For each, the keys whose hash and length agree.
        """
        with self._lock:
            self._flush()
            tables, dead = self._tables, set(self._dead)
        found: list[list[str]] = [[] for _ in contents]
        for table in tables:
            for keys, content in zip(found, contents, strict=True):
                keys += [key for key in table.with_content(content) if key not in dead]
        return found

    def _rows_held(self) -> int:
        return sum(len(table.keys) for table in self._tables) + sum(len(rows[0]) for rows in self._pending)

    def _flush(self) -> None:
        """Sort what is pending into the tables, each of which stays at least twice as long as the next."""
        if not self._pending:
            return
        batches, self._pending = self._pending, []
        keys = [key for batch in batches for key in batch[0]]
        table = HashTable.build(
            keys,
            np.concatenate([batch[1] for batch in batches]),
            np.concatenate([batch[2] for batch in batches]),
            np.concatenate([batch[3] for batch in batches]),
        )
        tables = [*self._tables, table]
        while len(tables) > 1 and 2 * len(tables[-1].keys) >= len(tables[-2].keys):
            last = tables.pop()
            tables[-1] = tables[-1].merged(last)
        self._tables = tuple(tables)
