"""The key that all queries of a layer agree about: added to keys, it changes all their scores by the same number.

Queries have a large mean in most models, which is what makes attention sinks possible. So there is a vector whose
product with nearly every query is the same. Subtracting a part of it from the keys of some tokens makes all rows attend
less to them, as a bias of their scores would, and no operator has to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fused_kv_kernels import rerotate_keys
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.cache import FusedCache
from fused_kv_llm.model.cache_pool import CachePool
from fused_kv_llm.model.forward import forward_kv
from fused_kv_llm.model.forward_pass import KVPass
from fused_kv_llm.model.loading import LoadedModel
from fused_kv_llm.model.owner import ModelOwner
from fused_kv_llm.model.sample import sample_ids

__all__ = ["common_keys"]

_DISTANCES = (50, 100, 200, 400, 800, 1600)
"""Tokens between a query and the keys whose scores it gives."""

_ROWS = slice(8, None, 4)
"""Whose queries are looked at: the first ones have next to nothing to attend to, and queries of their own."""

_RIDGE = 0.1
_MOST_SPREAD = 0.3
"""Standard deviation of the scores, whose mean is 1, above which a head's queries have nothing in common."""


def common_keys(loaded: LoadedModel, owner: ModelOwner, stopped: Callable[[], bool]) -> Tensor:
    """Return, for every layer and key head, the vector whose score is about 1 for every query that attends to it.

    Parameters
    ----------
    loaded : LoadedModel
    owner : ModelOwner
        Computes the forward of some 200 tokens that the queries come from.
    stopped : callable
        Asked before it.

    Returns
    -------
    Tensor
        float32 ``[L, Hkv, D]``, for a key at position 0: one that stands elsewhere has it rotated by its position.
        Zeros for heads whose queries have nothing in common, for layers that do not attend to what they cache (latent
        attention), and for the first layer, whose keys depend on nothing but their token.

    Raises
    ------
    StoppedError
        If it was stopped.
    """
    geometry, ids = loaded.geometry, sample_ids(loaded)
    heads, dim, _ = geometry.room
    found = torch.zeros(geometry.num_layers, heads, dim, device=loaded.device)
    if not geometry.attends_cache or len(ids) <= _ROWS.start:
        return found
    seen = owner.run(lambda: _queries(loaded, ids), len(ids), stopped)
    for layer, parts in seen.items():
        shape = geometry.shapes[layer]
        common = _common(torch.cat(parts, 1))
        found[layer, : shape.heads, : shape.key_dim] = common
    found[0] = 0
    return found


def _common(queries: Tensor) -> Tensor:
    """Return the vectors ``[Hkv, D]`` whose product with all queries ``[Hkv, N, D]`` of their head is nearest to 1."""
    wide = queries.double()
    mean, power = wide.mean(1), wide.mT @ wide / wide.shape[1]
    ridge = _RIDGE * power.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(1e-12)
    vector = torch.linalg.solve(power + torch.diag_embed(ridge[:, None].expand_as(mean)), mean)
    products = torch.einsum("hnd,hd->hn", wide, vector)
    size = products.mean(1, keepdim=True).clamp_min(1e-12)
    is_common = products.std(1, keepdim=True) < _MOST_SPREAD * size
    return torch.where(is_common, vector / size, 0.0).float()


class _QueryPass(KVPass):
    """Keeps the queries of every layer that attends, times the scale of its scores, as they are at some distances."""

    def __init__(self, rows: Tensor, loaded: LoadedModel) -> None:
        super().__init__(rows, len(rows), loaded.geometry.num_layers - 1)
        deltas = [loaded.geometry.tables(far - rows[_ROWS].cpu(), rows.device) for far in _DISTANCES]
        self._tables = list(zip(*deltas, strict=True))
        self.queries: dict[int, list[Tensor]] = {}

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output, or end the forward."""
        by_head = q[0, :, _ROWS].float() * rule.scale
        for table in self._tables[self.kv_layer]:
            # A key at position 0 sees the query at that distance.
            far = rerotate_keys(by_head, table).reshape(k.shape[1], -1, q.shape[3])
            self.queries.setdefault(self.kv_layer, []).append(far)
        return super().attend(layer_idx, q, k, v, rule)


def _queries(loaded: LoadedModel, ids: Sequence[int]) -> dict[int, list[Tensor]]:
    """Return by layer of the cache the queries ``[Hkv, N, D]`` that attend to it."""
    loaded.check_unchanged()
    rows = torch.arange(len(ids), device=loaded.device)
    cache = FusedCache(loaded.geometry, len(ids), CachePool(loaded.dtype, loaded.device, max_bytes=0))
    forward_pass = _QueryPass(rows, loaded)
    try:
        with torch.inference_mode():
            forward_kv(loaded, torch.tensor([ids], device=loaded.device), rows, cache, forward_pass)
    finally:
        cache.release()
    return forward_pass.queries
