"""Packed prefill: several chunks in one forward, each after a context of its own whose KV is at hand.

The chunks' tokens stand one after another in a single row, so that no padding is computed; attention goes chunk by
chunk, over the context's KV moved to its place and the chunk's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_kernels import RowPlan, rerotate_keys, rotation_tables, row_attention
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model.cache import BatchCache
from fused_kv_llm.model.forward import PrefixKV, StopForwardError, forward_kv
from fused_kv_llm.model.geometry import Geometry
from fused_kv_llm.model.loading import LoadedModel

__all__ = ["PackedChunk", "prefill_packed"]


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A chunk and what stands before it.

    Parameters
    ----------
    token_ids : tuple of int
        ``T`` ids.
    context : tuple of ChunkKV
        KV that stands between the header and the chunk, in order; each is moved to its place there.
    """

    token_ids: tuple[int, ...]
    context: tuple[ChunkKV, ...] = ()

    @property
    def num_context_tokens(self) -> int:
        """Tokens between the header and the chunk."""
        return sum(len(kv.token_ids) for kv in self.context)


class _PackedPass:
    """Attention of a packed forward."""

    def __init__(self, chunks: Sequence[PackedChunk], prefix: PrefixKV, geometry: Geometry) -> None:
        self.prefix = prefix
        self.last_layer = geometry.num_layers - 1
        self.spans: list[slice] = []
        self.plans: list[RowPlan] = []
        self.pieces = [kv for chunk in chunks for kv in chunk.context]
        self.context_spans: list[slice] = []
        before, begin, end = len(prefix.token_ids), 0, 0
        deltas: list[Tensor] = []
        for chunk in chunks:
            tokens, at = len(chunk.token_ids), before
            for kv in chunk.context:
                deltas.append(torch.full((len(kv.token_ids),), at - kv.position))
                at += len(kv.token_ids)
            self.spans.append(slice(begin, begin + tokens))
            self.plans.append(RowPlan(torch.arange(at, at + tokens, device=prefix.keys.device), at + tokens))
            self.context_spans.append(slice(end, end + at - before))
            begin, end = begin + tokens, end + at - before
        positions = torch.cat([plan.q_positions for plan in self.plans])
        self.positions = positions
        tables = rotation_tables(torch.cat([torch.empty(0, dtype=torch.int64), *deltas]), geometry.inv_freq)
        self.cos, self.sin = (table.to(prefix.keys.device) for table in tables)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention output ``[1, Hq, R, D]``, or end the forward at the last layer."""
        if layer_idx == self.last_layer:
            raise StopForwardError
        before_k, before_v = self.prefix.keys[layer_idx], self.prefix.values[layer_idx]
        moved, values = before_k[:, :0], before_v[:, :0]
        if self.pieces:
            keys = torch.cat([kv.keys[layer_idx] for kv in self.pieces], dim=1).to(before_k.device)
            moved = rerotate_keys(keys, self.cos, self.sin).to(before_k.dtype)
            values = torch.cat([kv.values[layer_idx] for kv in self.pieces], dim=1).to(before_v.device)
        out = torch.empty_like(q)
        for span, context, plan in zip(self.spans, self.context_spans, self.plans, strict=True):
            chunk_k = torch.cat((before_k, moved[:, context], k[0, :, span]), dim=1)
            chunk_v = torch.cat((before_v, values[:, context], v[0, :, span]), dim=1)
            out[:, :, span] = row_attention(q[:, :, span], chunk_k[None], chunk_v[None], plan, scale)
        return out


def prefill_packed(loaded: LoadedModel, chunks: Sequence[PackedChunk], prefix: PrefixKV) -> list[ChunkKV]:
    """Compute the KV of chunks that each follow the header and a context of their own.

    FusionRAG section 3.1, equation 10: the context's KV is taken as it is, the chunk attends to it. The keys
    are moved back to the position right after the header, where every stored chunk stands.

    Parameters
    ----------
    loaded : LoadedModel
    chunks : sequence of PackedChunk
    prefix : PrefixKV
        The header's KV, ``P`` tokens.

    Returns
    -------
    list of ChunkKV
        One for each chunk, at position ``P``, in the model's dtype on its device.
    """
    geometry = loaded.geometry
    state = _PackedPass(chunks, prefix, geometry)
    ids = torch.tensor([[i for chunk in chunks for i in chunk.token_ids]], device=loaded.device)
    cache = BatchCache(prefix.keys[:, :, :0], prefix.values[:, :, :0])
    with torch.inference_mode():
        forward_kv(loaded, ids, state.positions, cache, state)
        keys, values = cache.chunk(0, ids.shape[1])
        home = len(prefix.token_ids)
        return [_at_home(keys[:, :, span], values[:, :, span], chunk, home, geometry)
                for chunk, span in zip(chunks, state.spans, strict=True)]  # fmt: skip


def _at_home(keys: Tensor, values: Tensor, chunk: PackedChunk, home: int, geometry: Geometry) -> ChunkKV:
    if chunk.context:
        tables = rotation_tables(torch.full((len(chunk.token_ids),), -chunk.num_context_tokens), geometry.inv_freq)
        cos, sin = (table.to(keys.device) for table in tables)
        keys = rerotate_keys(keys, cos, sin).to(values.dtype)
    return ChunkKV(keys.contiguous(), values.contiguous(), chunk.token_ids, home)
