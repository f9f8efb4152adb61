"""Cache-Craft: fix each chunk as much as its record says (Agarwal et al. 2025, sections 3.1 to 3.3).

What is recorded when a chunk ``C_i`` is cached behind others, by layer (:mod:`fused_kv_llm.offline.variant_builder`):

- (3) ``inter(C_i, C_j) = sum over k in C_i, l in C_j of a_kl``
- (4) ``intra(C_i) = sum over k, l in C_i, l < k of a_kl``

and what follows from it behind the chunks ``S_new`` of a prompt:

- (6) ``beta = sum of inter(i, j) over j in S_old and S_new / sum of inter(i, j) over j in S_old``
- (7) ``gamma = discordant pairs / (m (m - 1) / 2)`` of the ``m`` chunks in both, (8) ``beta' = beta (1 - gamma)``
- (9) ``a = sum over j < i of inter(C_j, C_i) / (|C_i| |C_j|)``, ``b = intra(C_i) / |C_i|^2``, (10) their means over
  layers, (11) ``CCI = 1 / (1 + exp(-a / b))``
- (12) ``CFO = alpha CCI (1 - beta')``; (13) ``alpha* = argmin E[CFO_alpha]`` at a quality that is asked for:
  ``fused-kv calibrate alpha``
- (14) ``T(C_i) = arg top ceil(CFO |C_i|) of sum over j < i of inter(C_j, t)``
- (15) and algorithm 1, the question's focus: :mod:`.focus`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from .base import Probe, Selector, required
from .budget import allocate, top_positions
from .views import FirstLayersView, View

__all__ = [
    "CacheCraft",
    "VariantSelector",
    "adjusted_overlap",
    "cache_context_impact",
    "fix_overhead",
    "plain_overhead",
    "variant_selector",
]


@runtime_checkable
class VariantSelector(Selector, Protocol):
    """A selector for which the engine takes the variant of the least cache fix overhead, where variants are kept."""

    @property
    def alpha(self) -> float:
        """What the overhead is scaled with (equation 12)."""

    @property
    def takes_variants(self) -> bool:
        """Whether it does; a selector that never does need not have this."""


def variant_selector(selector: Selector) -> VariantSelector | None:
    """Return a selector that takes variants of chunks; None for one that takes plain KV."""
    return selector if isinstance(selector, VariantSelector) and selector.takes_variants else None


@dataclass(frozen=True, slots=True)
class CacheCraft:
    """Recompute of each chunk as many tokens as its cache fix overhead says, those that looked most at other chunks.

    ``N_i = ceil(CFO_i |C_i|)`` of the tokens with the highest recorded attention to the chunks that stood before
    (equation 14); where the request's ratio allows fewer, each chunk's part is cut alike. Of a chunk's plain KV, which
    was computed behind no chunk, no attention is recorded: its first tokens are taken, and none of the prompt's first
    chunk, since that stands where it was computed. Rows of chunks that the question turns out not to look at leave the
    forward (algorithm 1).

    Parameters
    ----------
    alpha : float
        Scale of the overhead (equations 12 and 13).
    focus_window : int
        Layers for which the question's focus must be the same before the other chunks' rows leave (section 3.2.2,
        algorithm 1); 0 has them stay.
    """

    name: ClassVar[str] = "cache_craft"
    takes_variants: ClassVar[bool] = True
    alpha: float = 1.0
    focus_window: int = 3

    def view(self, num_layers: int) -> View | FirstLayersView:
        """Return that nothing is looked at before the selection: everything was recorded."""
        return FirstLayersView(focus_window=self.focus_window) if self.focus_window else View()

    def select(self, probe: Probe, budget: int) -> Tensor:
        """Return the most contextualised tokens of the chunks.

        Raises
        ------
        FusedKVError
            If the probe does not say what was recorded, which is a fault of the caller.
        """
        overhead = required(probe.overhead, "the chunks' overheads", self.name)
        recorded = required(probe.recorded, "recorded attention to earlier chunks", self.name)
        sizes = torch.bincount(probe.chunk_index, minlength=overhead.shape[0])
        counts = torch.minimum((overhead * sizes - 1e-9).ceil().long(), sizes)
        if int(counts.sum()) > budget:
            counts = allocate(budget, counts, sizes)
        parts = [
            top_positions(probe.positions[mine], recorded[mine], int(counts[chunk]))
            for chunk in range(sizes.shape[0])
            for mine in [probe.chunk_index == chunk]
        ]
        return torch.cat(parts).sort().values


def cache_context_impact(inter: Tensor, intra: Tensor, prefix_tokens: Sequence[int], num_tokens: int) -> float:
    """Return how much what stood before a chunk shaped its KV (equations 9 to 11).

    Parameters
    ----------
    inter : Tensor
        ``[L, P]``: by layer, the chunk's attention to each chunk before it (equation 3).
    intra : Tensor
        ``[L]``: by layer, its attention to its own earlier tokens (equation 4).
    prefix_tokens : sequence of int
        Tokens of the chunks before it.
    num_tokens : int
        Its own.

    Returns
    -------
    float
        ``1 / (1 + exp(-a / b))``, from 0.5, where it looked at none of them, towards 1.
    """
    sizes = torch.tensor(list(prefix_tokens), dtype=torch.float64)
    a = float((inter.double() / (num_tokens * sizes)).sum(-1).mean())
    b = float((intra.double() / num_tokens**2).mean())
    # A chunk of one token has no earlier one of its own.
    ratio = a / b if b > 0.0 else math.inf if a > 0.0 else 0.0
    return 1.0 / (1.0 + math.exp(-ratio))


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


def fix_overhead(
    impact: float, inter: Sequence[float], old: Sequence[str], new: Sequence[str], alpha: float = 1.0
) -> float:
    """Return a chunk's cache fix overhead ``alpha CCI (1 - beta')``, at most 1 (equation 12).

    Parameters
    ----------
    impact : float
        CCI.
    inter, old, new
        As :func:`adjusted_overlap` takes them.
    alpha : float
    """
    return min(1.0, alpha * impact * (1.0 - adjusted_overlap(inter, old, new)))


def plain_overhead(is_first: bool, alpha: float = 1.0) -> float:
    """Return the overhead of KV that was computed behind no chunk.

    Parameters
    ----------
    is_first : bool
        Whether no chunk stands before it in the prompt either.
    alpha : float
    """
    return fix_overhead(0.5, (), (), () if is_first else ("another",), alpha)
