"""Ranking a chunk's tokens: which of them stand for it in a probe (QCFuse section 3.3.1).

(14) ``A_i = TopK(G_i, ceil(r_a |c_i|))`` of a chunk ``c_i``, by a rule's ranking ``G_i``. They are put together in the
prompt's order (15), with the chunk's own KV at these tokens (16): :mod:`fused_kv_llm.online.anchors`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .views import View

__all__ = ["anchor_positions", "is_of_shift", "knorm_scores", "sidecar_names", "sink_scores"]

_OF_SHIFT = "-shifted"
_LONGEST_LIST = 60
"""Characters of a list of layers that a file's name has room for; of a longer one its digest stands there."""


def sidecar_names(view: View) -> tuple[str, ...]:
    """Return the names of the files that hold a chunk's anchors for a view.

    That for a prompt's first chunk comes last; if a context shift is added to anchors elsewhere, that with it is first.
    Without anchors there are none.
    """
    anchors = view.anchors
    if anchors is None:
        return ()
    stored = "" if anchors.storage == "auto" else f"{anchors.storage}-"
    kept, layers = f"anchor-kv-{anchors.rule}-{anchors.ratio:g}-{stored}", [*map(str, view.layers)]
    own = kept + _listed(layers)
    return (own,) if view.anchor_shift is None else (kept + _listed([*layers, view.anchor_shift]) + _OF_SHIFT, own)


def is_of_shift(name: str) -> bool:
    """Return whether a sidecar holds anchors with a context shift, of which nothing is left when that is made anew."""
    return name.startswith("anchor-kv-") and name.endswith(_OF_SHIFT)


def _listed(parts: Sequence[str]) -> str:
    listed = "-".join(parts)
    return listed if len(listed) <= _LONGEST_LIST else hashlib.sha256(listed.encode()).hexdigest()[:32]


def anchor_positions(scores: Tensor, ratio: float) -> Tensor:
    """Return the best ``ceil(ratio * tokens)`` tokens of a chunk, int64 ascending (eq. 14).

    Parameters
    ----------
    scores : Tensor
        float32 ``[tokens]``; of equal ones the earlier wins.
    ratio : float
    """
    count = math.ceil(ratio * scores.shape[0])
    return torch.sort(scores, descending=True, stable=True).indices[:count].sort().values


def sink_scores(num_tokens: int) -> Tensor:
    """Rank the first tokens first (attention sinks, Xiao et al. 2024)."""
    return -torch.arange(num_tokens, dtype=torch.float32)


def knorm_scores(keys: Tensor) -> Tensor:
    """Rank tokens by small key norms, which draw attention (Devoto et al. 2024).

    Parameters
    ----------
    keys : Tensor
        ``[L, Hkv, tokens, D]``.

    Returns
    -------
    Tensor
        float32 ``[tokens]``, minus the norm averaged over layers and heads.
    """
    norms: Tensor = torch.linalg.vector_norm(keys.float(), dim=-1)
    return -norms.mean(dim=(0, 1))
