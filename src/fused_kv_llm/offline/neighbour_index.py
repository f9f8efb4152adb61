"""The nearest neighbours of every chunk of a corpus, kept up to date as chunks come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.errors import MissingExtraError

__all__ = ["Near", "NearestSearch", "NeighbourIndex", "nearest"]

_NONE = -1
# Beyond this many decimals, the same product differs with the order in which BLAS adds.
_DECIMALS = 6


NearestSearch = Callable[[NDArray[np.float32], NDArray[np.float32], int], tuple[NDArray[np.float32], NDArray[np.int64]]]
"""Vectors, queries and a number to the similarities of so many vectors nearest to each query, and their rows."""


class Near(NamedTuple):
    """The chunks nearest to a chunk: their keys, the nearest one first, and float32 cosine similarities."""

    keys: tuple[str, ...]
    similarity: tuple[float, ...]


class NeighbourIndex:
    """The `count` nearest neighbours of each chunk, by the inner product of unit vectors.

    Adding ``m`` chunks to ``n`` computes ``m * (2 * n + m)`` similarities, not ``(n + m) ** 2``: an old chunk's
    neighbours are known, and only a new chunk can be nearer than the last of them. Of equally near chunks the one
    with the smaller key comes first, so that the order of ingestion does not matter.

    Parameters
    ----------
    count : int
        Neighbours of a chunk; in a smaller corpus there are fewer.
    search : NearestSearch
        What searches; :func:`nearest` does it in this process.
    """

    def __init__(self, count: int, search: NearestSearch | None = None) -> None:
        self._count, self._nearest = count, search or nearest
        self._clear()

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._row

    def near(self, key: str) -> Near:
        """Return the nearest neighbours of a chunk that is in the index."""
        row = self._row[key]
        used = self._near[row] != _NONE
        others = tuple(self._keys[other] for other in self._near[row][used].tolist())
        return Near(others, tuple(self._similarity[row][used].tolist()))

    def restore(self, known: Mapping[str, Near], vectors: NDArray[np.float32]) -> None:
        """Start from neighbours that were found before.

        Parameters
        ----------
        known : mapping of str to Near
            Chunks that are all still there. Those with a neighbour that is not among them are searched anew by the
            next `update`.
        vectors : numpy.ndarray
            ``[chunks, dimensions]`` float32, in the mapping's order.
        """
        self._clear()
        self._append(list(known), vectors)
        for row, near in enumerate(known.values()):
            numbers = [self._row.get(key, _NONE) for key in near.keys[: self._count]]
            if _NONE not in numbers:
                self._near[row, : len(numbers)] = numbers
                self._similarity[row, : len(numbers)] = near.similarity[: self._count]

    def update(
        self, keys: Sequence[str], vectors_of: Callable[[Sequence[str]], NDArray[np.float32]]
    ) -> tuple[set[str], set[str]]:
        """Bring the index in step with a corpus.

        Parameters
        ----------
        keys : sequence of str
            All chunks of the corpus, distinct.
        vectors_of : callable
            Unit vectors ``[chunks, dimensions]`` of chunks that are new.

        Returns
        -------
        changed, gone : set of str
            Chunks whose neighbours are other ones now, and chunks that have left the corpus.

        Raises
        ------
        MissingExtraError
            If faiss is not installed.
        """
        wanted = set(keys)
        gone = self._row.keys() - wanted
        changed = self._remove(gone) if gone else set()
        added = [key for key in keys if key not in self._row]
        first = len(self)
        if added:
            self._append(added, vectors_of(added))
        changed.update(added)
        width = min(self._count, len(self) - 1)
        if width <= 0:
            return changed, gone
        # New chunks, and those that have lost a neighbour or had too few.
        unknown = np.flatnonzero(self._near[:, width - 1] == _NONE)
        nearer = self._rows_with_nearer(first, width) if added else np.zeros(0, np.int64)
        self._search(unknown, width)
        changed.update(self._keys[row] for row in (*unknown.tolist(), *nearer.tolist()))
        return changed, gone

    def _clear(self) -> None:
        self._keys: list[str] = []
        self._row: dict[str, int] = {}
        self._vectors = np.zeros((0, 0), np.float32)
        self._near = np.zeros((0, self._count), np.int64)
        self._similarity = np.zeros((0, self._count), np.float32)

    def _append(self, keys: Sequence[str], vectors: NDArray[np.float32]) -> None:
        self._row.update({key: row for row, key in enumerate(keys, len(self))})
        self._vectors = _joined(self._vectors, len(self), vectors.astype(np.float32))
        self._keys += keys
        shape = len(keys), self._count
        self._near = np.concatenate([self._near, np.full(shape, _NONE, np.int64)])
        self._similarity = np.concatenate([self._similarity, np.full(shape, -np.inf, np.float32)])

    def _remove(self, gone: set[str]) -> set[str]:
        """Take chunks out, and return those that have lost a neighbour by it."""
        stays = np.array([key not in gone for key in self._keys], dtype=bool)
        number = np.where(stays, np.cumsum(stays) - 1, _NONE)
        near = self._near[stays]
        self._near = np.where(near == _NONE, _NONE, number[near])
        lost = ((near != _NONE) & (self._near == _NONE)).any(axis=1)
        self._near[lost] = _NONE
        self._similarity = self._similarity[stays]
        self._similarity[lost] = -np.inf
        self._vectors = self._vectors[: len(self)][stays]
        self._keys = [key for key in self._keys if key not in gone]
        self._row = {key: row for row, key in enumerate(self._keys)}
        return {self._keys[row] for row in np.flatnonzero(lost).tolist()}

    def _search(self, rows: NDArray[np.int64], width: int) -> None:
        """Find the neighbours of these chunks among all."""
        if len(rows) == 0:
            return
        vectors = self._vectors[: len(self)]
        similarity, found = self._search_in(vectors, vectors[rows], width + 1)
        for row, scores, others in zip(rows.tolist(), similarity.tolist(), found.tolist(), strict=True):
            self._set(row, [(s, o) for s, o in zip(scores, others, strict=True) if o != row], width)

    def _search_in(
        self, vectors: NDArray[np.float32], queries: NDArray[np.float32], count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        similarity, rows = self._nearest(vectors, queries, count)
        return np.round(similarity, _DECIMALS), rows

    def _rows_with_nearer(self, first: int, width: int) -> NDArray[np.int64]:
        """Give old chunks the new ones, from `first` on, that are nearer than their last neighbour."""
        old = np.flatnonzero(self._near[:first, width - 1] != _NONE)
        if len(old) == 0:
            return old
        new = self._vectors[first : len(self)]
        similarity, found = self._search_in(new, self._vectors[old], min(width, len(new)))
        closer = similarity[:, 0] >= self._similarity[old, width - 1]
        changed = []
        for row, scores, others in zip(old[closer].tolist(), similarity[closer], found[closer], strict=True):
            before = self._near[row, :width].tolist()
            known = list(zip(self._similarity[row, :width].tolist(), before, strict=True))
            self._set(row, known + list(zip(scores.tolist(), (others + first).tolist(), strict=True)), width)
            if self._near[row, :width].tolist() != before:
                changed.append(row)
        return np.array(changed, dtype=np.int64)

    def _set(self, row: int, candidates: list[tuple[float, int]], width: int) -> None:
        ordered = sorted(candidates, key=lambda pair: (-pair[0], self._keys[pair[1]]))[:width]
        self._near[row, :width] = [other for _, other in ordered]
        self._similarity[row, :width] = [score for score, _ in ordered]


def nearest(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the vectors nearest to each query, by the inner product.

    Parameters
    ----------
    vectors, queries : numpy.ndarray
        ``[vectors, dimensions]`` and ``[queries, dimensions]`` float32.
    count : int
        At most the number of vectors.

    Returns
    -------
    similarity, rows : numpy.ndarray
        ``[queries, count]`` float32 and int64, the nearest one first.

    Raises
    ------
    MissingExtraError
        If faiss is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "similar") from error
    similarity, rows = faiss.knn(queries, vectors, count, metric=faiss.METRIC_INNER_PRODUCT)
    return similarity, rows


def _joined(rows: NDArray[np.float32], used: int, more: NDArray[np.float32]) -> NDArray[np.float32]:
    """Append rows to those in use; there is room for as many again, so that appending one does not copy them all."""
    if used == 0 or used + len(more) > len(rows):
        grown = np.empty((max(used + len(more), 2 * used), more.shape[1]), np.float32)
        grown[:used] = rows[:used] if used else 0
        rows = grown
    rows[used : used + len(more)] = more
    return rows
