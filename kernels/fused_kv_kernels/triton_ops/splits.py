"""Splitting the keys among programs where there are too few blocks of rows to fill the device."""

from __future__ import annotations

__all__ = ["choose_splits"]

_LEAST_KEYS = 256
_MOST_SPLITS = 64


def choose_splits(blocks: int, keys: int, programs: int) -> int:
    """Return among how many programs to split the keys.

    Parameters
    ----------
    blocks : int
        Programs that there are without splitting.
    keys : int
        Keys of the longest sequence.
    programs : int
        Programs that the device runs side by side.

    Returns
    -------
    int
        1 if the blocks fill the device alone; otherwise enough for two rounds of programs, but no split shorter than
        256 keys.
    """
    if blocks >= programs:
        return 1
    return max(1, min(2 * programs // max(blocks, 1), keys // _LEAST_KEYS, _MOST_SPLITS))
