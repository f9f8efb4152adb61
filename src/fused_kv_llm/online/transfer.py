"""Deviation transfer: what recomputed tokens teach about the tokens of their chunk that are not recomputed.

CacheBlend (section 4.2) measures how far fresh KV deviates from stored KV to choose tokens, and throws the measurement
away. But a good part of the deviation is common to a chunk: all its tokens now attend to the same other chunks. While a
layer is recomputed, the mean deviation of a chunk's recomputed tokens is added to the stored KV of its other tokens:

    K_j += R(p_j) s / (n + m) * sum_i R(-p_i) (K_i' - K_i),    V_j += s / (n + m) * sum_i (V_i' - V_i)

over the chunk's ``n`` recomputed tokens ``i``, with the rotation ``R(p)`` of position ``p``, a strength ``s``, and
``m`` that keeps chunks with few recomputed tokens from trusting them. A chunk whose KV is exact has no deviation and is
not changed.

Another part is along the chunk's context shift, which was added with the weight of an average prompt: how much more or
less of it holds in this one is fitted first (:meth:`ContextShift.refine`), and the mean is that of what remains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_kernels import TransferPlan, rotation_tables, transfer_deviation
from fused_kv_llm.model import FusedCache, Geometry

from .request import Request
from .shifting import ContextShift

__all__ = ["SHRINKAGE_TOKENS", "DeviationTransfer"]

SHRINKAGE_TOKENS = 6.0


class DeviationTransfer:
    """Corrects the stored KV of one request's chunks, layer by layer, during the fused pass.

    Parameters
    ----------
    request : Request
    selected : Tensor
        int64, ascending prompt positions of the recomputed chunk tokens; not empty.
    cache : FusedCache
        Its `rows` are those of the pass, `selected` among them.
    geometry : Geometry
    strength : float
        Share of the mean deviation that is transferred, in [0, 1].
    shift : ContextShift
        The chunks'.
    """

    def __init__(
        self,
        request: Request,
        selected: Tensor,
        cache: FusedCache,
        geometry: Geometry,
        strength: float,
        shift: ContextShift,
    ) -> None:
        device = cache.rows.device
        counts = torch.bincount(request.kind[selected], minlength=len(request.placements))
        spans = torch.tensor([(p.segment.start, p.segment.stop) for p in request.placements])
        cos, sin = rotation_tables(torch.arange(request.num_tokens), geometry.inv_freq)
        chosen = selected.to(device)
        self._cache = cache
        self._shift = shift
        self._plan = TransferPlan(
            selected=chosen,
            fresh_rows=torch.searchsorted(cache.rows, chosen),
            spans=spans.to(device),
            weights=(strength / (counts + SHRINKAGE_TOKENS)).to(device),
            cos=cos.to(device),
            sin=sin.to(device),
        )

    def watch(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Correct one layer, given its fresh rows ``[1, Hkv, R, D]`` before they replace the stored ones."""
        self._shift.refine(layer_idx, self._plan, SHRINKAGE_TOKENS, keys[0], values[0])
        stored = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        transfer_deviation(self._plan, keys[0], values[0], *stored)
