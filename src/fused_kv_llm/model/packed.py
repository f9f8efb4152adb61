"""Packed prefill: several chunks in one forward, each after a context of its own whose KV is in memory.

The chunks' tokens stand one after another in a single row, so that no padding is computed; attention goes chunk by
chunk, over the context's KV moved to its place and the chunk's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_kernels import ChunkStack, RowPlan, rerotate_keys
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.cache import BatchCache, FusedCache
from fused_kv_llm.model.cache_pool import CachePool
from fused_kv_llm.model.forward import PrefixKV, forward_kv
from fused_kv_llm.model.forward_pass import KVPass
from fused_kv_llm.model.geometry import Geometry
from fused_kv_llm.model.loading import LoadedModel
from fused_kv_llm.model.mask import MaskRule
from fused_kv_llm.model.numbers import check_numbers
from fused_kv_llm.model.pass_context import StopForwardError

__all__ = ["PackedChunk", "prefill_packed"]


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A chunk and what stands before it.

    Parameters
    ----------
    token_ids : tuple of int
        ``T`` ids.
    context : tuple of ChunkKV
        KV that stands between the prefix and the chunk, in order; each is moved to its place there.
    """

    token_ids: tuple[int, ...]
    context: tuple[ChunkKV, ...] = ()

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the context."""
        return sum(len(kv.token_ids) for kv in self.context)


class _PackedPass(KVPass):
    """A packed forward: attention goes chunk by chunk, over the prefix, the chunk's context and the chunk itself."""

    def __init__(self, chunks: Sequence[PackedChunk], prefix: PrefixKV, geometry: Geometry, dtype: torch.dtype) -> None:
        device, before = prefix.keys.device, len(prefix.token_ids)
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        super().__init__(torch.arange(rows, device=device), rows, geometry.num_layers - 1)
        self.prefix = prefix
        self.spans: list[slice] = []
        self.stretches: list[slice] = []
        self.own: list[Tensor] = []
        starts: list[int] = []
        deltas: list[int] = []
        row = at = 0
        for chunk in chunks:
            begin, tokens = at, len(chunk.token_ids)
            at += before
            for kv in chunk.context:
                starts.append(at)
                deltas.append(at - begin - kv.position)
                at += len(kv.token_ids)
            self.spans.append(slice(row, row + tokens))
            row, at = row + tokens, at + tokens
            self.stretches.append(slice(begin, at))
            self.own.append(torch.arange(at - tokens - begin, at - begin, device=device))
        self.positions = torch.cat(self.own)
        self._chunk_plans: dict[MaskRule, list[RowPlan]] = {}
        pieces = [(kv.keys, kv.values) for chunk in chunks for kv in chunk.context]
        tables = geometry.tables(torch.tensor(deltas, dtype=torch.int64), device)
        self.stack = ChunkStack(pieces, starts, tables)
        heads, *dims = geometry.room
        self.keys, self.values = (torch.empty(heads, at, dim, dtype=dtype, device=device) for dim in dims)
        self.shapes = geometry.shapes

    def _plans_of(self, mask: MaskRule) -> list[RowPlan]:
        """Return what each chunk's rows see of its stretch under a mask."""
        if mask not in self._chunk_plans:
            self._chunk_plans[mask] = [
                RowPlan(own, len(keys), first_keys=mask.first_keys(own, keys, own))
                for own, keys in ((own, torch.arange(int(own[-1]) + 1, device=own.device)) for own in self.own)
            ]
        return self._chunk_plans[mask]

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output ``[1, Hq, R, Dv]``, or end the forward at the last layer."""
        if layer_idx == self.last_layer:
            raise StopForwardError
        self.stack.place(layer_idx, self.keys, self.values)
        shape = self.shapes[layer_idx]
        keys, values = shape.of_keys(self.keys), shape.of_values(self.values)
        before = shape.of_keys(self.prefix.keys[layer_idx]), shape.of_values(self.prefix.values[layer_idx])
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for span, stretch, plan in zip(self.spans, self.stretches, self._plans_of(rule.mask), strict=True):
            for whole, prefix, own in zip((keys, values), before, (k, v), strict=True):
                whole[:, stretch.start : stretch.start + prefix.shape[1]] = prefix
                whole[:, stretch.stop - plan.num_rows : stretch.stop] = own[0, :, span]
            seen = keys[None, :, stretch], values[None, :, stretch]
            out[:, :, span] = rule.attention(q[:, :, span], *seen, plan)
        return out


def prefill_packed(loaded: LoadedModel, chunks: Sequence[PackedChunk], prefix: PrefixKV) -> list[ChunkKV]:
    """Compute the KV of chunks that each follow the prefix and a context of their own.

    FusionRAG section 3.1, equation 10: the context's KV is taken as it is, the chunk attends to it. The keys
    are moved back to the position right after the prefix, where every stored chunk stands.

    Parameters
    ----------
    loaded : LoadedModel
    chunks : sequence of PackedChunk
    prefix : PrefixKV
        The prefix's KV, ``P`` tokens.

    Returns
    -------
    list of ChunkKV
        One for each chunk, at position ``P``, in the model's dtype on its device.
    """
    geometry = loaded.geometry
    if not geometry.attends_cache:
        return [_prefill_alone(loaded, chunk, prefix) for chunk in chunks]
    state = _PackedPass(chunks, prefix, geometry, loaded.dtype)
    ids = torch.tensor([[i for chunk in chunks for i in chunk.token_ids]], device=loaded.device)
    cache = BatchCache(geometry.num_layers, geometry.room, swaps=geometry.swaps)
    with torch.inference_mode():
        forward_kv(loaded, ids, state.positions, cache, state)
        check_numbers([(layer.keys, layer.values) for layer in cache.layers], loaded.model_id, loaded.dtype)
        home = len(prefix.token_ids)
        return [_at_home(*cache.chunk(0, span), chunk, home, geometry)
                for chunk, span in zip(chunks, state.spans, strict=True)]  # fmt: skip


def _prefill_alone(loaded: LoadedModel, chunk: PackedChunk, prefix: PrefixKV) -> ChunkKV:
    """Compute a chunk in a cache of its own, for layers that do not attend to what they cache."""
    geometry, home = loaded.geometry, len(prefix.token_ids)
    begin = home + chunk.num_context_tokens
    stop = begin + len(chunk.token_ids)
    cache = FusedCache(geometry, stop, CachePool(loaded.dtype, loaded.device))
    with torch.inference_mode():
        cache.keys[:, 0, :, :home], cache.values[:, 0, :, :home] = prefix.keys, prefix.values
        at = home
        for kv in chunk.context:
            tables = geometry.tables(torch.tensor([at - kv.position]), loaded.device)
            stack = ChunkStack([(kv.keys, kv.values)], [at], tables)
            for layer in range(geometry.num_layers):
                stack.place(layer, cache.keys[layer, 0], cache.values[layer, 0])
            at += len(kv.token_ids)
        rows = torch.arange(begin, stop, device=loaded.device)
        ids = torch.tensor([chunk.token_ids], device=loaded.device)
        forward_kv(loaded, ids, rows, cache, KVPass(rows, stop, geometry.num_layers - 1))
        check_numbers(list(zip(cache.keys, cache.values, strict=True)), loaded.model_id, loaded.dtype, rows)
        keys, values = (part[:, 0, :, begin:].clone() for part in (cache.keys, cache.values))
        return _at_home(keys, values, chunk, home, geometry)


def _at_home(keys: Tensor, values: Tensor, chunk: PackedChunk, home: int, geometry: Geometry) -> ChunkKV:
    if before := chunk.num_context_tokens:
        tables = geometry.tables(torch.full((len(chunk.token_ids),), -before), keys.device)
        moved = [rerotate_keys(layer, table) for layer, table in zip(keys, tables, strict=True)]
        keys = torch.stack(moved).to(values.dtype)
    return ChunkKV(keys.contiguous(), values.contiguous(), chunk.token_ids, home)
