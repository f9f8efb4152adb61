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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import ConfigError
from .cover import best_cover
from .texthash import WINDOW, SpanHashes, content_hash, is_indexable

__all__ = ["WINDOW", "ContentIndex", "Match", "content_hash", "is_indexable"]

_PAIRS_PER_BLOCK = 1 << 18
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


@dataclass(frozen=True, slots=True)
class _Table:
    """An immutable part of the index.

    ``keys``, ``prefix``, ``full`` and ``length`` are parallel, in ascending order of ``full``. ``heads`` are
    the distinct prefix hashes, ascending; ``lengths[first[i]:first[i + 1]]`` the distinct lengths of head i.
    """

    keys: list[str]
    prefix: NDArray[np.uint64]
    full: NDArray[np.uint64]
    length: NDArray[np.uint32]
    heads: NDArray[np.uint64]
    first: NDArray[np.uint32]
    lengths: NDArray[np.uint32]

    @classmethod
    def build(
        cls, keys: list[str], prefix: NDArray[np.uint64], full: NDArray[np.uint64], length: NDArray[np.uint32]
    ) -> _Table:
        """Sort the rows, drop rows that repeat a key and its hash, and derive the heads."""
        order = np.argsort(full, kind="stable")
        order = order[~_repeats(keys, full, order)]
        prefix, full, length = prefix[order], full[order], length[order]
        by_head = np.lexsort((length, prefix))
        sorted_prefix, sorted_length = prefix[by_head], length[by_head]
        new_head = np.ones(len(order), dtype=bool)
        new_head[1:] = sorted_prefix[1:] != sorted_prefix[:-1]
        new_pair = new_head.copy()
        new_pair[1:] |= sorted_length[1:] != sorted_length[:-1]
        first = np.append(np.flatnonzero(new_head[new_pair]), np.count_nonzero(new_pair))
        return cls(
            keys=[keys[i] for i in order.tolist()],
            prefix=prefix,
            full=full,
            length=length,
            heads=sorted_prefix[new_head],
            first=first.astype(np.uint32),
            lengths=sorted_length[new_pair],
        )

    def without(self, dead: set[str]) -> _Table:
        """The same table less some keys."""
        kept = [i for i, key in enumerate(self.keys) if key not in dead]
        return _Table.build(
            [self.keys[i] for i in kept], self.prefix[kept], self.full[kept], self.length[kept]
        )

    def merged(self, other: _Table) -> _Table:
        """One table with the rows of both."""
        return _Table.build(
            self.keys + other.keys,
            np.concatenate([self.prefix, other.prefix]),
            np.concatenate([self.full, other.full]),
            np.concatenate([self.length, other.length]),
        )

    def candidates(self, hashes: SpanHashes, windows: NDArray[np.uint64]) -> Iterator[Match]:
        """Spans whose hash and length are those of a stored chunk."""
        head = np.searchsorted(self.heads, windows)
        head[head == len(self.heads)] = 0
        offsets = np.flatnonzero(self.heads[head] == windows)
        head = head[offsets]
        begin = self.first[head].astype(np.int64)
        counts = self.first[head + 1].astype(np.int64) - begin
        for lo, hi in _blocks(counts):
            which, rank = _expand(counts[lo:hi])
            starts = offsets[lo:hi][which]
            lengths = self.lengths[begin[lo:hi][which] + rank].astype(np.int64)
            fits = starts + lengths <= len(hashes)
            starts, lengths = starts[fits], lengths[fits]
            wanted = hashes.spans(starts, lengths)
            left = np.searchsorted(self.full, wanted)
            left[left == len(self.full)] = 0
            for i in np.flatnonzero(self.full[left] == wanted).tolist():
                yield from self._rows(int(left[i]), int(starts[i]), int(lengths[i]))

    def _rows(self, row: int, start: int, length: int) -> Iterator[Match]:
        full = self.full[row]
        while row < len(self.full) and self.full[row] == full:
            if self.length[row] == length:
                yield Match(self.keys[row], start, start + length)
            row += 1


def _repeats(keys: list[str], full: NDArray[np.uint64], order: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Mark, in sorted order, the rows whose key already stands among the rows of the same full hash."""
    repeated = np.zeros(len(order), dtype=bool)
    ordered = full[order]
    seen: set[str] = set()
    run = -1
    for i in np.flatnonzero(ordered[1:] == ordered[:-1]).tolist():
        if i != run:
            seen = {keys[order[i]]}
        run = i + 1
        key = keys[order[run]]
        repeated[run] = key in seen
        seen.add(key)
    return repeated


def _blocks(counts: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut into runs of about ``_PAIRS_PER_BLOCK`` pairs, at least one item each."""
    totals = np.cumsum(counts)
    lo = 0
    while lo < len(counts):
        done = int(totals[lo - 1]) if lo else 0
        hi = max(lo + 1, int(np.searchsorted(totals, done + _PAIRS_PER_BLOCK, side="right")))
        yield lo, hi
        lo = hi


def _expand(counts: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """For counts [2, 3]: the items [0, 0, 1, 1, 1] and the ranks within them [0, 1, 0, 1, 2]."""
    which = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return which, np.arange(len(which)) - starts[which]


class ContentIndex:
    """Index over the texts of stored chunks; thread-safe.

    Additions are collected and sorted at the next search, into tables of geometrically growing size, so
    that adding n chunks one by one, with searches between, costs O(n log^2 n) in all. Removed keys are
    skipped at once and swept out when they are many.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[_Columns] = []
        self._tables: tuple[_Table, ...] = ()
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
                self._tables = tuple(
                    kept for table in self._tables if (kept := table.without(self._dead)).keys
                )
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
        candidates = [match for table in tables for match in table.candidates(hashes, windows)]
        with self._lock:
            candidates = [match for match in candidates if match.key not in self._dead]
        if not candidates:
            return []
        texts = text_of(list(dict.fromkeys(match.key for match in candidates)))
        verified: dict[tuple[int, int], Match] = {}
        for match in candidates:
            stored = texts.get(match.key)
            if stored is not None and text[match.start : match.end] == stored:
                verified.setdefault((match.start, match.end), match)
        matches = list(verified.values())
        return [matches[i] for i in best_cover(list(verified))]

    def _rows_held(self) -> int:
        return sum(len(table.keys) for table in self._tables) + sum(len(rows[0]) for rows in self._pending)

    def _flush(self) -> None:
        """Sort what is pending into the tables, each of which stays at least twice as long as the next."""
        if not self._pending:
            return
        batches, self._pending = self._pending, []
        keys = [key for batch in batches for key in batch[0]]
        table = _Table.build(
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
