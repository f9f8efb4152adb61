"""Choice of non-overlapping spans that cover as much as possible."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["best_cover"]


def best_cover(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Select non-overlapping spans of greatest total length (weighted interval scheduling).

    Among selections of equal length the one with the fewest spans is taken, because every span edge
    costs a few recomputed tokens.

    Parameters
    ----------
    spans : sequence of (int, int)
        Half-open, non-empty intervals.

    Returns
    -------
    list of int
        Indices into ``spans``, in ascending order of the intervals.
    """
    order = sorted(range(len(spans)), key=lambda i: (spans[i][1], spans[i][0]))
    ends = [spans[i][1] for i in order]
    scale = len(spans) + 1
    best = [0]
    previous = []
    for rank, i in enumerate(order):
        start, end = spans[i]
        before = bisect_right(ends, start, 0, rank)
        previous.append(before)
        best.append(max(best[rank], best[before] + (end - start) * scale - 1))
    chosen: list[int] = []
    rank = len(order)
    while rank > 0:
        if best[rank] == best[rank - 1]:
            rank -= 1
        else:
            chosen.append(order[rank - 1])
            rank = previous[rank - 1]
    return chosen[::-1]
