"""The chunks that a question focuses on (Cache-Craft section 3.2.2, algorithm 1).

(15) ``cinter_l(C_i, U) = sum over l' <= l of inter_l'(C_i, U)`` is cumulated while the layers are computed
(:mod:`fused_kv_llm.online.first_layers`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["focused_chunks", "is_settled"]


def focused_chunks(attention: Tensor) -> frozenset[int]:
    """Return the chunks that the question focuses on (algorithm 1, lines 4 to 9).

    The gaps between the sorted scores, divided by their sum, are read as a distribution with the cumulated entropy
    ``h``. ``i* = argmax(h[i + 1] - h[i])``, counted from 1, and the ``i*`` highest chunks are in focus. The algorithm
    needs three chunks; with fewer, all are in focus.

    Parameters
    ----------
    attention : Tensor
        float ``[K]``, attention from the question to each chunk, cumulated over layers (eq. 15).

    Returns
    -------
    frozenset of int
        Indices of the chunks in focus.
    """
    ordered = torch.sort(attention.double(), descending=True, stable=True)
    gaps = -ordered.values.diff()
    if attention.shape[0] < 3 or float(gaps.sum()) <= 0.0:
        return frozenset(range(attention.shape[0]))
    share = gaps / gaps.sum()
    entropy = torch.special.entr(share)
    # h[i + 1] - h[i] is the entropy of gap i + 1, so the first gap is no candidate.
    cut = int(entropy[1:].argmax()) + 1
    return frozenset(ordered.indices[:cut].tolist())


def is_settled(history: Sequence[frozenset[int]], window: int) -> bool:
    """Return whether the focus is final (algorithm 1, line 11): ``l > w`` and the last `w` layers have the same.

    Parameters
    ----------
    history : sequence of frozenset of int
        The chunks in focus after each of the ``l`` layers so far.
    window : int
        The algorithm's ``w``, at least 1.
    """
    return len(history) > window and len(set(history[-window:])) == 1
