"""Cache-Craft without records: its overhead and its choice of tokens, from what the prompt's first layers show.

Cache-Craft (Agarwal et al. 2025) knows what it needs of a chunk from when its KV was cached. This rule stands in for it
where nothing was recorded; :mod:`.cache_craft` is the method itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import Probe, required
from .budget import allocate, top_positions
from .views import FirstLayersView

__all__ = ["CacheCraftOnline", "context_impact"]


@dataclass(frozen=True, slots=True)
class CacheCraftOnline:
    """Divide the budget by cache fix overhead; inside a chunk take the tokens that look most at earlier chunks.

    ``CFO_i = alpha * CCI_i * (1 - beta'_i)`` (eq. 12), ``N_i = ceil(CFO_i * |C_i|)`` and ``T(C_i) = arg top N_i of
    sum over j < i of inter(C_j, t)`` (eq. 14).

    The paper stores a chunk as a live prompt left it and knows its attention to that prompt's chunks. Chunks are
    stored here without chunks before them, so nothing was recorded: inter and intra attention come from a forward of
    the prompt through its first layers, ``beta'`` is 0 for every chunk but the prompt's first, whose prefix is the
    one it was stored with. Attention to chunks whose KV an earlier prompt has left is not seen.

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

    name: ClassVar[str] = "cache_craft_online"
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
        overhead = context_impact(given, probe.chunk_index)
        if probe.has_first_chunk:
            # It stands where its KV was computed: beta' is 1.
            overhead[:1] = 0.0
        # Of a chunk without overhead nothing is recomputed (eq. 12), however large the budget is.
        room = torch.where(overhead > 0.0, sizes, 0)
        counts = allocate(min(budget, int(room.sum())), overhead * room, room)
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
    ``CCI = 1 / (1 + exp(-a / b))``: 0.5 for a chunk that looks at no earlier chunk, towards 1 for one that does. Unlike
    equation 4, ``intra`` has each token's attention to itself, which `given` does not tell apart.

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
