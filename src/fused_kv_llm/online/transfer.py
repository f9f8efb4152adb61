"""Deviation transfer: what recomputed tokens teach about the tokens of their chunk that are not recomputed.

CacheBlend (section 4.2) measures how far fresh KV deviates from stored KV to choose tokens, and throws the measurement
away. But a good part of the deviation is common to a chunk: all its tokens now attend to the same other chunks. While a
layer is recomputed, the mean deviation of a chunk's recomputed tokens is added to the stored KV of its other tokens:

    K_j += R(p_j) s / (n + m) * sum_i R(-p_i) (K_i' - K_i),    V_j += s / (n + m) * sum_i (V_i' - V_i)

over the chunk's ``n`` recomputed tokens ``i``, with the rotation ``R(p)`` of position ``p``, a strength ``s``, and
``m`` that keeps chunks with few recomputed tokens from trusting them. A chunk whose KV is exact has no deviation and is
not changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_kernels import rerotate_keys, rotation_tables
from fused_kv_llm.model import FusedCache, Geometry

from .request import Request
from .shifting import add_turned

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
    """

    def __init__(
        self, request: Request, selected: Tensor, cache: FusedCache, geometry: Geometry, strength: float
    ) -> None:
        device = cache.rows.device
        chosen = request.kind[selected]
        counts = torch.bincount(chosen, minlength=len(request.placements))
        weights = strength / (counts + SHRINKAGE_TOKENS)
        self._cache = cache
        self._selected = selected.to(device)
        self._fresh = torch.searchsorted(cache.rows, self._selected)
        self._chunk_of_selected = chosen.to(device)
        self._weights = weights.to(device)[None, :, None]
        self._spans = [(p.segment.start, p.segment.stop) for p in request.placements]
        cos, sin = rotation_tables(torch.arange(request.num_tokens), geometry.inv_freq)
        self._to_zero = (cos[selected].to(device), -sin[selected].to(device))
        # Rounded to the cache's dtype: a correction is small against the key it is added to.
        self._to_place = (cos.to(device, cache.keys.dtype), sin.to(device, cache.keys.dtype))

    def watch(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Correct one layer, given its fresh rows ``[1, Hkv, R, D]`` before they replace the stored ones."""
        stored_k, stored_v = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        deviation_v = self._mean(self._deviation(values, stored_v)).to(stored_v.dtype)
        deviation_k = self._mean(rerotate_keys(self._deviation(keys, stored_k), *self._to_zero)).to(stored_k.dtype)
        for chunk, (start, stop) in enumerate(self._spans):
            stored_v[:, start:stop] += deviation_v[:, chunk : chunk + 1]
            cos, sin = (table[start:stop] for table in self._to_place)
            add_turned(stored_k[:, start:stop], deviation_k[:, chunk : chunk + 1], cos, sin)

    def _deviation(self, fresh: Tensor, stored: Tensor) -> Tensor:
        """Return fresh minus stored of the recomputed tokens, float32 ``[Hkv, n, D]``."""
        return fresh[0].index_select(1, self._fresh).float() - stored.index_select(1, self._selected).float()

    def _mean(self, deviation: Tensor) -> Tensor:
        """Return the weighted sum by chunk, float32 ``[Hkv, K, D]``."""
        heads, _, dim = deviation.shape
        total = torch.zeros(heads, len(self._spans), dim, device=deviation.device)
        return total.index_add_(1, self._chunk_of_selected, deviation) * self._weights
