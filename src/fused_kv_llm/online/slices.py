"""Cutting the rows of a fused pass, so that a long prompt is computed beside answers that are being written.

Rows attend by true position and earlier ones are complete in every layer when later ones begin: slices of ascending
rows give what one pass gives. What recomputed tokens teach about their chunk is learnt from all of them at once, so a
chunk's rows stay together.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["first_slice"]


def first_slice(kind: Tensor, max_rows: int) -> int:
    """Return how many of the next rows form a slice.

    Parameters
    ----------
    kind : Tensor
        int64 ``[R]``, not empty: the chunk that each row is of, negative for fresh rows.
    max_rows : int
        Most rows; the rows of one chunk are not cut, however many they are.

    Returns
    -------
    int
        Between 1 and ``R``.
    """
    rows = kind.shape[0]
    if rows <= max_rows:
        return rows
    may_cut = torch.ones(rows + 1, dtype=torch.bool)
    may_cut[1:-1] = (kind[1:] != kind[:-1]) | (kind[1:] < 0)
    places = may_cut[1:].nonzero()[:, 0] + 1
    fitting = places[places <= max_rows]
    return int(fitting[-1] if fitting.shape[0] else places[0])
