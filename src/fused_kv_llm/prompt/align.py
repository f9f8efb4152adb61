"""Longest run of token ids that a prompt's slice shares with a chunk's stand-alone ids.

A tokenizer sees the neighbours of a chunk's first and last characters, so the slice of the prompt that
holds a chunk's text may differ from the chunk's own ids by a few tokens at the edges. The run between
them is what can be reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Alignment", "align"]


@dataclass(frozen=True, slots=True)
class Alignment:
    """A run of equal ids.

    Parameters
    ----------
    slice_start : int
        Where the run starts in the prompt's slice.
    chunk_start : int
        Where it starts in the chunk's ids.
    length : int
        Tokens in the run; 0 when nothing is shared (both starts are 0 then).
    """

    slice_start: int
    chunk_start: int
    length: int


def align(slice_ids: Sequence[int], chunk_ids: Sequence[int]) -> Alignment:
    """Find the longest common contiguous run of two id sequences.

    Every diagonal ``slice[i] == chunk[i + shift]`` is one vectorised comparison. They are visited from the
    longest to the shortest and the search ends as soon as the best run is as long as the next diagonal, so
    a chunk that differs at its edges only costs a handful of comparisons. The result is exact for any
    input; the worst case is O(n * m) time in O(n + m) memory.

    Parameters
    ----------
    slice_ids : sequence of int
        Ids of the prompt's tokens inside the chunk's text.
    chunk_ids : sequence of int
        The chunk's stand-alone ids.

    Returns
    -------
    Alignment
        A longest common run.
    """
    left = np.asarray(slice_ids, dtype=np.int64)
    right = np.asarray(chunk_ids, dtype=np.int64)
    best = Alignment(0, 0, 0)
    for shift in _shifts(len(left), len(right)):
        start = max(0, -shift)
        stop = min(len(left), len(right) - shift)
        if best.length >= stop - start:
            break
        equal = left[start:stop] == right[start + shift : stop + shift]
        if np.count_nonzero(equal) <= best.length:
            continue
        offset, length = _longest_true_run(equal)
        if length > best.length:
            best = Alignment(start + offset, start + shift + offset, length)
    return best


def _shifts(slice_length: int, chunk_length: int) -> Iterator[int]:
    """Every shift at which the sequences overlap, longest overlap first."""
    if not slice_length or not chunk_length:
        return
    lowest, highest = sorted((0, chunk_length - slice_length))
    # The two ends of the plateau come first: a difference in length is nearly always an edge token merged
    # or split at one side.
    yield 0
    if lowest != highest:
        yield chunk_length - slice_length
    yield from range(lowest + 1, highest)
    for step in range(1, min(slice_length, chunk_length)):
        yield lowest - step
        yield highest + step


def _longest_true_run(values: NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the first longest run of True."""
    bounds = np.concatenate(([-1], np.flatnonzero(~values), [len(values)]))
    lengths = np.diff(bounds) - 1
    longest = int(np.argmax(lengths))
    return int(bounds[longest]) + 1, int(lengths[longest])
