"""Finds stored chunks inside a text, by content.

The index knows of each chunk only a number, the hash of its first ``WINDOW`` characters, the hash of its
whole text and its length: at most 44 bytes. A text is scanned in three steps:

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
from .hash_table import Candidate, HashTable
from .texthash import WINDOW, SpanHashes, content_hash, is_indexable

__all__ = ["WINDOW", "ContentIndex", "Match", "content_hash", "is_indexable"]

_PENDING_BATCHES = 256

_Columns = tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]


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
    that adding n chunks one by one, with searches between, costs O(n log^2 n) in all. Removed chunks are
    skipped at once and swept out when they are many.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[_Columns] = []
        self._tables: tuple[HashTable, ...] = ()
        self._dead: set[int] = set()

    def __len__(self) -> int:
        """Rows held, with those that wait to be swept out."""
        with self._lock:
            return self._rows_held()

    def add(self, numbers: ArrayLike, prefix: ArrayLike, full: ArrayLike, length: ArrayLike) -> None:
        """Add chunks; a number that is already there with the same hash is kept once.

        Parameters
        ----------
        numbers : array_like of int
            ``[n]``, what the chunks are called here.
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
            np.array(numbers, dtype=np.int64),
            np.array(prefix, dtype=np.uint64),
            np.array(full, dtype=np.uint64),
            np.array(length, dtype=np.uint32),
        )
        count = len(columns[0])
        if any(column.shape != (count,) for column in columns):
            shapes = ", ".join(str(column.shape) for column in columns[1:])
            raise ConfigError(f"Expected a prefix, a full hash and a length for each of {count} chunks, got {shapes}.")
        if count == 0:
            return
        with self._lock:
            self._pending.append(columns)
            if self._dead:
                self._dead.difference_update(columns[0].tolist())
            if len(self._pending) >= _PENDING_BATCHES:
                self._flush()

    def remove(self, numbers: Sequence[int]) -> None:
        """Forget chunks; unknown numbers are ignored.

        Parameters
        ----------
        numbers : sequence of int
            The chunks.
        """
        with self._lock:
            self._dead.update(numbers)
            # Numbers are not checked when they are removed (that would take a dictionary of all of them), so
            # unknown ones count too until the sweep.
            if 4 * len(self._dead) >= self._rows_held():
                self._flush()
                self._tables = tuple(kept for table in self._tables if len((kept := table.without(self._dead)).numbers))
                self._dead = set()

    def find(self, text: str, text_of: Callable[[Sequence[int]], Mapping[int, str]]) -> list[Candidate]:
        """Find stored chunks in a text.

        Parameters
        ----------
        text : str
            The text to search, for example a rendered prompt.
        text_of : callable
            Given numbers, returns the texts of those chunks it knows. It is called at most once, with the chunks
            whose hashes agree, and outside the index's lock.

        Returns
        -------
        list of tuple of int
            Number, start and end: non-overlapping, ascending, covering as many characters as possible, by as few
            chunks as possible. When several chunks share a text, any one of them whose text was returned is used.
        """
        candidates = self._candidates(text)
        if not candidates:
            return []
        texts = text_of(list(dict.fromkeys(number for number, _, _ in candidates)))
        verified: dict[tuple[int, int], int] = {}
        for number, start, end in candidates:
            if (start, end) not in verified and texts.get(number) == text[start:end]:
                verified[start, end] = number
        spans = list(verified)
        return [(verified[spans[i]], *spans[i]) for i in best_cover(spans)]

    def find_alike(self, text: str) -> list[Candidate]:
        """Find spans of a text whose 64-bit hash and length are a chunk's, without comparing texts.

        For decisions that only cost time when they are wrong. Chunks need not have their texts at hand.

        Parameters
        ----------
        text : str

        Returns
        -------
        list of tuple of int
            As :meth:`find` returns them.
        """
        found = {(start, end): number for number, start, end in self._candidates(text)}
        spans = list(found)
        return [(found[spans[i]], *spans[i]) for i in best_cover(spans)]

    def lookup(self, contents: Sequence[ContentHash]) -> list[list[int]]:
        """Find chunks by the hashes of their whole text.

        Parameters
        ----------
        contents : sequence of ContentHash

        Returns
        -------
        list of list of int
            For each, the chunks whose hash and length agree.
        """
        with self._lock:
            self._flush()
            tables, dead = self._tables, set(self._dead)
        found: list[list[int]] = [[] for _ in contents]
        for table in tables:
            for numbers, content in zip(found, contents, strict=True):
                numbers += [number for number in table.with_content(content) if number not in dead]
        return found

    def similar(self, content: ContentHash, limit: int) -> list[int]:
        """Find chunks that may be another form of a text, by its hashes and its length.

        Parameters
        ----------
        content : ContentHash
        limit : int
            The most chunks.

        Returns
        -------
        list of int
            First the newest with the same beginning, then the newest between half and twice as long.
        """
        with self._lock:
            self._flush()
            tables, dead = self._tables, set(self._dead)
        alike: list[int] = []
        others: list[int] = []
        for table in tables:
            same = table.prefix == np.uint64(content.prefix)
            near = (table.length >= content.length // 2) & (table.length <= 2 * content.length) & ~same
            alike += table.numbers[same].tolist()
            others += np.sort(table.numbers[near])[-limit:].tolist()
        newest = [*sorted(alike, reverse=True), *sorted(others, reverse=True)]
        return [number for number in newest if number not in dead][:limit]

    def _candidates(self, text: str) -> list[Candidate]:
        with self._lock:
            self._flush()
            tables = self._tables
        if not tables or not is_indexable(text):
            return []
        hashes = SpanHashes(text)
        windows = hashes.windows()
        candidates = [found for table in tables for found in table.candidates(hashes, windows)]
        with self._lock:
            return [found for found in candidates if found[0] not in self._dead]

    def _rows_held(self) -> int:
        return sum(len(table.numbers) for table in self._tables) + sum(len(rows[0]) for rows in self._pending)

    def _flush(self) -> None:
        """Sort what is pending into the tables, each of which stays at least twice as long as the next."""
        if not self._pending:
            return
        batches, self._pending = self._pending, []
        table = HashTable.build(
            np.concatenate([batch[0] for batch in batches]),
            np.concatenate([batch[1] for batch in batches]),
            np.concatenate([batch[2] for batch in batches]),
            np.concatenate([batch[3] for batch in batches]),
        )
        del batches
        tables = [*self._tables, table]
        while len(tables) > 1 and 2 * len(tables[-1].numbers) >= len(tables[-2].numbers):
            last = tables.pop()
            tables[-1] = tables[-1].merged(last)
        self._tables = tuple(tables)
