"""Packed prefill: several chunks in one forward, each after a context of its own whose KV is in memory.

The chunks' tokens stand one after another in a single row, so that no padding is computed; attention goes chunk by
chunk, over the context's KV moved to its place and the chunk's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_kernels import ChunkStack, RowPlan, rerotate_keys, rotation_table, row_attention
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model.cache import BatchCache
from fused_kv_llm.model.forward import PrefixKV, forward_kv
from fused_kv_llm.model.geometry import Geometry
from fused_kv_llm.model.loading import LoadedModel
from fused_kv_llm.model.pass_context import KVPass, StopForwardError

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
        """Tokens between the prefix and the chunk."""
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
        self.plans: list[RowPlan] = []
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
            self.plans.append(RowPlan(torch.arange(at - tokens - begin, at - begin, device=device), at - begin))
        self.positions = torch.cat([plan.q_positions for plan in self.plans])
        pieces = [(kv.keys, kv.values) for chunk in chunks for kv in chunk.context]
        table = rotation_table(torch.tensor(deltas, dtype=torch.int64), geometry.inv_freq).to(device)
        self.stack = ChunkStack(pieces, starts, [table] * geometry.num_layers)
        self.keys, self.values = torch.empty(
            2, geometry.num_kv_heads, at, geometry.head_dim, dtype=dtype, device=device
        )

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention output ``[1, Hq, R, D]``, or end the forward at the last layer."""
        if layer_idx == self.last_layer:
            raise StopForwardError
        self.stack.place(layer_idx, self.keys, self.values)
        out = torch.empty_like(q)
        for span, stretch, plan in zip(self.spans, self.stretches, self.plans, strict=True):
            for whole, before, own in ((self.keys, self.prefix.keys, k), (self.values, self.prefix.values, v)):
                whole[:, stretch.start : stretch.start + before.shape[2]] = before[layer_idx]
                whole[:, stretch.stop - plan.num_rows : stretch.stop] = own[0, :, span]
            keys, values = self.keys[None, :, stretch], self.values[None, :, stretch]
            out[:, :, span] = row_attention(q[:, :, span], keys, values, plan, scale)
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
    state = _PackedPass(chunks, prefix, geometry, loaded.dtype)
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
        back = torch.full((len(chunk.token_ids),), -chunk.num_context_tokens)
        keys = rerotate_keys(keys, rotation_table(back, geometry.inv_freq).to(keys.device)).to(values.dtype)
    return ChunkKV(keys.contiguous(), values.contiguous(), chunk.token_ids, home)
