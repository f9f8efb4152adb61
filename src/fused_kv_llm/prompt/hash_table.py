"""Hashes of many chunks, sorted so that those in a text are found by binary search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.chunk import ContentHash

from .texthash import SpanHashes

__all__ = ["Candidate", "HashTable"]

Candidate = tuple[int, int, int]
"""Number of a chunk, and start and end of a span whose hash is the chunk's."""

_PAIRS_PER_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True)
class HashTable:
    """An immutable part of a content index.

    Parameters
    ----------
    numbers : numpy.ndarray
        ``[n]`` int64, numbers of the chunks, in ascending order of ``full``.
    prefix, full : numpy.ndarray
        ``[n]`` uint64, the chunks' hashes.
    length : numpy.ndarray
        ``[n]`` uint32, the chunks' lengths in characters.
    heads : numpy.ndarray
        ``[h]`` uint64, the distinct prefix hashes, ascending.
    first, lengths : numpy.ndarray
        uint32; ``lengths[first[i]:first[i + 1]]`` are the distinct lengths of head ``i``.
    """

    numbers: NDArray[np.int64]
    prefix: NDArray[np.uint64]
    full: NDArray[np.uint64]
    length: NDArray[np.uint32]
    heads: NDArray[np.uint64]
    first: NDArray[np.uint32]
    lengths: NDArray[np.uint32]

    @classmethod
    def build(
        cls,
        numbers: NDArray[np.int64],
        prefix: NDArray[np.uint64],
        full: NDArray[np.uint64],
        length: NDArray[np.uint32],
    ) -> HashTable:
        """Sort the rows, drop rows that repeat a number and its hash, and derive the heads."""
        order = np.lexsort((numbers, full))
        order = order[~_repeats(numbers, full, order)]
        numbers, prefix, full, length = numbers[order], prefix[order], full[order], length[order]
        by_head = np.lexsort((length, prefix))
        sorted_prefix, sorted_length = prefix[by_head], length[by_head]
        new_head = np.ones(len(order), dtype=bool)
        new_head[1:] = sorted_prefix[1:] != sorted_prefix[:-1]
        new_pair = new_head.copy()
        new_pair[1:] |= sorted_length[1:] != sorted_length[:-1]
        first = np.append(np.flatnonzero(new_head[new_pair]), np.count_nonzero(new_pair))
        return cls(
            numbers=numbers,
            prefix=prefix,
            full=full,
            length=length,
            heads=sorted_prefix[new_head],
            first=first.astype(np.uint32),
            lengths=sorted_length[new_pair],
        )

    def without(self, dead: set[int]) -> HashTable:
        """The same table less some chunks."""
        kept = ~np.isin(self.numbers, np.fromiter(dead, dtype=np.int64, count=len(dead)))
        return HashTable.build(self.numbers[kept], self.prefix[kept], self.full[kept], self.length[kept])

    def merged(self, other: HashTable) -> HashTable:
        """One table with the rows of both."""
        return HashTable.build(
            np.concatenate([self.numbers, other.numbers]),
            np.concatenate([self.prefix, other.prefix]),
            np.concatenate([self.full, other.full]),
            np.concatenate([self.length, other.length]),
        )

    def candidates(self, hashes: SpanHashes, windows: NDArray[np.uint64]) -> Iterator[Candidate]:
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
                yield from self._rows(int(left[i]), int(starts[i]), int(lengths[i]), int(wanted[i]))

    def with_content(self, content: ContentHash) -> Iterator[int]:
        """Numbers of the chunks with that hash and length."""
        row = int(np.searchsorted(self.full, np.uint64(content.full)))
        for number, _, _ in self._rows(row, 0, content.length, content.full):
            yield number

    def _rows(self, row: int, start: int, length: int, full: int) -> Iterator[Candidate]:
        while row < len(self.full) and self.full[row] == full:
            if self.length[row] == length:
                yield int(self.numbers[row]), start, start + length
            row += 1


def _repeats(numbers: NDArray[np.int64], full: NDArray[np.uint64], order: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Mark, in sorted order, the rows whose number and hash are those of the row before."""
    repeated = np.zeros(len(order), dtype=bool)
    by_hash, by_number = full[order], numbers[order]
    repeated[1:] = (by_hash[1:] == by_hash[:-1]) & (by_number[1:] == by_number[:-1])
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
