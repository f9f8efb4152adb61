"""Hashes of any span of a text in constant time.

A text ``c_0 c_1 ...`` of code points gets the prefix sums ``S_i = sum_{j<i} v(c_j) * B**j`` modulo 2**64.
The hash of the span of ``n`` characters at ``i`` is ``mix((S_{i+n} - S_i) * B**-i)``: it depends on the
characters alone, not on where they stand, and numpy evaluates it for thousands of spans at once. ``B`` is
odd, hence invertible modulo 2**64.

The hashes are stored on disk beside the chunks, so any change to this file's arithmetic is a change of
``fused_kv_llm.chunk.FORMAT_VERSION``.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..chunk import ContentHash
from ..errors import ConfigError

__all__ = ["WINDOW", "SpanHashes", "content_hash", "is_indexable"]

WINDOW = 32
"""Characters by which a chunk is first recognised; shorter texts cannot be indexed."""

_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_OFFSET = np.uint64(0xD1B54A32D192ED03)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every input bit over the whole word (the finaliser of splitmix64), in place."""
    values ^= values >> np.uint64(30)
    values *= _MULTIPLIER_1
    values ^= values >> np.uint64(27)
    values *= _MULTIPLIER_2
    values ^= values >> np.uint64(31)
    return values


class _Powers:
    """``B**j`` and ``B**-j`` modulo 2**64, computed once and grown by doubling."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables = self._compute(4096)

    @staticmethod
    def _compute(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        tables = []
        for base in (_BASE, _BASE_INVERSE):
            factors = np.full(count, base, dtype=np.uint64)
            factors[0] = 1
            tables.append(np.multiply.accumulate(factors))
        return tables[0], tables[1]

    def up_to(self, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """At least ``count`` powers of the base and of its inverse."""
        tables = self._tables
        if len(tables[0]) < count:
            with self._lock:
                if len(self._tables[0]) < count:
                    self._tables = self._compute(max(count, 2 * len(self._tables[0])))
                tables = self._tables
        return tables


_POWERS = _Powers()


class SpanHashes:
    """Hashes of the spans of one text.

    Parameters
    ----------
    text : str
        Any string; lone surrogates are hashed like other code points.
    """

    def __init__(self, text: str) -> None:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        powers, self._inverses = _POWERS.up_to(len(points) + 1)
        # Mixed values instead of bare code points: in a sum modulo 2**64 the low bits would otherwise
        # depend on nothing but the low bits of the characters.
        values = _mix(points.astype(np.uint64) + _OFFSET)
        values *= powers[: len(points)]
        self._sums = np.zeros(len(points) + 1, dtype=np.uint64)
        np.cumsum(values, out=self._sums[1:])

    def __len__(self) -> int:
        return len(self._sums) - 1

    def spans(self, starts: ArrayLike, lengths: ArrayLike) -> NDArray[np.uint64]:
        """Hash many spans.

        Parameters
        ----------
        starts, lengths : array_like of int
            ``[n]``, character offsets and numbers of characters; every span must lie in the text.

        Returns
        -------
        numpy.ndarray
            ``[n]`` uint64.
        """
        begin = np.asarray(starts, dtype=np.int64)
        end = begin + np.asarray(lengths, dtype=np.int64)
        return _mix((self._sums[end] - self._sums[begin]) * self._inverses[begin])

    def windows(self) -> NDArray[np.uint64]:
        """Hash every span of ``WINDOW`` characters.

        Returns
        -------
        numpy.ndarray
            ``[len(text) - WINDOW + 1]`` uint64, one for each offset; empty for a shorter text.
        """
        count = max(len(self) - WINDOW + 1, 0)
        sums = self._sums[WINDOW : WINDOW + count] - self._sums[:count]
        return _mix(sums * self._inverses[:count])


def is_indexable(text: str) -> bool:
    """Tell whether a text is long enough (``WINDOW`` characters) to be found inside a prompt."""
    return len(text) >= WINDOW


def content_hash(text: str) -> ContentHash:
    """Compute the hashes by which a chunk's text is found inside a prompt.

    Parameters
    ----------
    text : str
        The chunk's text, at least ``WINDOW`` characters.

    Returns
    -------
    ContentHash
        Unsigned 64-bit hashes of the first ``WINDOW`` characters and of the whole text, and its length.

    Raises
    ------
    ConfigError
        If the text is shorter than ``WINDOW`` characters.
    """
    if not is_indexable(text):
        raise ConfigError(
            f"A text of {len(text)} characters cannot be found inside a prompt: {WINDOW} are needed. "
            "Skip such texts (is_indexable tells) or split the documents into longer chunks."
        )
    prefix, full = SpanHashes(text).spans([0, 0], [WINDOW, len(text)]).tolist()
    return ContentHash(prefix=prefix, full=full, length=len(text))
