"""Cache-Craft: fix the chunks that the prompt before them changes most (Agarwal et al. 2025, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Probe, required
from .budget import allocate, top_positions
from .views import FirstLayersView

__all__ = ["CacheCraft", "adjusted_overlap", "context_impact", "focused_chunks"]


@dataclass(frozen=True, slots=True)
class CacheCraft:
    """Divide the budget by cache fix overhead; inside a chunk take the tokens that look most at earlier chunks.

    ``CFO_i = alpha * CCI_i * (1 - beta'_i)`` (eq. 12), ``N_i = ceil(CFO_i * |C_i|)`` and ``T(C_i) = arg top N_i of
    sum over j < i of inter(C_j, t)`` (eq. 14).

    The paper stores a chunk as a live prompt left it and knows its attention to that prompt's chunks. Chunks are
    stored here without chunks before them, so nothing was recorded: inter and intra attention come from a forward of
    the prompt through its first layers, ``beta'`` is 0 for every chunk but the prompt's first, whose prefix is the
    one it was stored with.

    Parameters
    ----------
    layers : int
        First layers over which attention is averaged (eq. 10 averages over all).
    alpha : float or None
        Scale of the overhead; fewer tokens than the budget are taken where it asks for fewer. None spends the
        budget, in proportion to CFO.
    focus_window : int
        Layers for which the question's focus must be stable before the other chunks' recomputation stops
        (section 3.2.2); 0 never stops it.
    """

    name: ClassVar[str] = "cache_craft"
    layers: int = 2
    alpha: float | None = None
    focus_window: int = 3

    def view(self, num_layers: int) -> FirstLayersView:
        """Return the first layers' attention."""
        return FirstLayersView(attention=tuple(range(min(self.layers, num_layers))), focus_window=self.focus_window)

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the most contextualised tokens of the chunks.

        Raises
        ------
        FusedKVError
            If the probe has no attention between chunks, which is a fault of the caller.
        """
        given = required(probe.given, "attention weights between chunks", self.name)
        sizes = torch.bincount(probe.chunk_index, minlength=given.shape[1])
        names = [str(chunk) for chunk in range(sizes.shape[0])]
        overlap = torch.tensor([adjusted_overlap((), (), names[:chunk]) for chunk in range(len(names))])
        overhead = context_impact(given, probe.chunk_index) * (1.0 - overlap)
        counts = allocate(budget, overhead * sizes, sizes)
        if self.alpha is not None:
            counts = torch.minimum(counts, (self.alpha * overhead * sizes).ceil().long())
        earlier = torch.arange(given.shape[1])[None, :] < probe.chunk_index[:, None]
        inter = (given * earlier).sum(1)
        parts = [
            top_positions(probe.positions[mine], inter[mine], int(counts[chunk]))
            for chunk in range(sizes.shape[0])
            for mine in [probe.chunk_index == chunk]
        ]
        return torch.cat(parts).sort().values


def context_impact(given: Tensor, chunk_index: Tensor) -> Tensor:
    """Return each chunk's cache context impact (eq. 9 and 11).

    ``a = sum over j < i of inter(C_j, C_i) / (|C_i| |C_j|)``, ``b = intra(C_i) / |C_i|^2``,
    ``CCI = 1 / (1 + exp(-a / b))``: 0.5 for a chunk that looks at no earlier chunk, towards 1 for one that does.

    Parameters
    ----------
    given : Tensor
        float32 ``[C, K]``, attention of every token to every chunk.
    chunk_index : Tensor
        int64 ``[C]``.

    Returns
    -------
    Tensor
        float64 ``[K]``.
    """
    count = given.shape[1]
    sizes = torch.bincount(chunk_index, minlength=count).double().clamp(min=1.0)
    between = torch.zeros(count, count, dtype=torch.float64).index_add_(0, chunk_index, given.double())
    inter = (between / (sizes[:, None] * sizes[None, :])).tril(-1).sum(1)
    intra = between.diagonal() / sizes**2
    return torch.sigmoid(inter / intra.clamp(min=1e-12))


def adjusted_overlap(inter: Sequence[float], old: Sequence[str], new: Sequence[str]) -> float:
    """Return the adjusted prefix overlap ``beta' = beta * (1 - gamma)`` of a chunk (eq. 6 to 8).

    Parameters
    ----------
    inter : sequence of float
        The chunk's attention to each chunk of its old prefix.
    old, new : sequence of str
        Names of the chunks before it when it was stored, and now.

    Returns
    -------
    float
        1 where the prefix is the same, 0 where nothing of it is left. An empty old prefix overlaps with an empty
        new one only.
    """
    if not old:
        return float(not new)
    total = sum(inter)
    kept = sum(weight for weight, name in zip(inter, old, strict=True) if name in set(new))
    beta = kept / total if total > 0 else 0.0
    common = [name for name in old if name in set(new)]
    places = [list(new).index(name) for name in common]
    pairs = len(common) * (len(common) - 1) // 2
    discordant = sum(a > b for i, a in enumerate(places) for b in places[i + 1 :])
    return beta * (1.0 - (discordant / pairs if pairs else 0.0))


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
