"""Selective recomputation written out plainly, layer by layer, for a Llama: the oracle of fusion and probe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from fused_kv_kernels.reference import rerotate_keys_reference, row_attention_reference
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.kv import ChunkSink
from fused_kv_llm.model import CachePool, FusedCache
from fused_kv_llm.online import Request
from fused_kv_llm.online.request_kv import RequestKV


def stitched_kv(engine: FusedKVEngine, request: Request) -> FusedCache:
    """Return a cache with the prefix's and the chunks' stored KV in place and nothing else."""
    return stitched(engine, request).cache


def stitched(engine: FusedKVEngine, request: Request) -> RequestKV:
    """Return the same as a probe takes it; nothing is left to be filled."""
    # Of memory of its own: the engine's is written in inference mode only.
    pool = CachePool(engine.loaded.dtype, engine.loaded.device)
    kv = RequestKV(replace(engine.requests.context, pool=pool), request, request.num_tokens)
    count = request.prefix_tokens
    for part in (kv.cache.keys, kv.cache.values):
        part[:, :, :, count:] = 0
    num_layers = engine.loaded.geometry.num_layers
    sink = ChunkSink(request.chunks, kv.cache, engine.loaded.geometry)
    sink.receive(range(num_layers), [chunk.stored.read_stored(0, num_layers) for chunk in request.chunks])
    for layer in range(num_layers):
        sink.place(layer)
    return kv


def project(layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys and the values, each ``[1, heads, R, D]``."""
    attention, normed = layer.self_attn, layer.input_layernorm(hidden)
    shape = (1, hidden.shape[1], -1, attention.head_dim)
    q, k, v = (p(normed).view(shape).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *rotary)
    return q, k, v


def finish(layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
    """Return the layer's output from its attention output ``[1, heads, R, D]``."""
    hidden = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).reshape(hidden.shape[0], hidden.shape[1], -1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


@torch.inference_mode()
def recompute_rows(
    model: Any,
    ids: list[int],
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    kind: Tensor | None = None,
    transfer: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Recompute `rows` over stored keys and values ``[L, 1, Hkv, N, D]``, transferring their chunks' deviation.

    Returns
    -------
    tuple of Tensor
        Logits of the last row, and the fused keys and values.
    """
    keys, values = keys.clone(), values.clone()
    decoder = model.model
    hidden = decoder.embed_tokens(torch.tensor([ids])[:, rows])
    rotary = decoder.rotary_emb(hidden, rows[None])
    for index, layer in enumerate(decoder.layers):
        q, k, v = project(layer, hidden, rotary)
        if transfer:
            _transfer(keys[index, 0], values[index, 0], k[0], v[0], rows, kind, transfer, decoder.rotary_emb.inv_freq)
        for number, row in enumerate(rows.tolist()):
            keys[index, :, :, row] = k[:, :, number]
            values[index, :, :, row] = v[:, :, number]
        attended = row_attention_reference(q, keys[index], values[index], rows, layer.self_attn.scaling)
        hidden = finish(layer, hidden, attended)
    return model.lm_head(decoder.norm(hidden))[0, -1], keys, values


def _transfer(
    stored_k: Tensor, stored_v: Tensor, k: Tensor, v: Tensor, rows: Tensor, kind: Tensor, strength: float, freq: Tensor
) -> None:
    """Add the shrunken mean deviation of a chunk's recomputed tokens to all its tokens, one token after another."""

    def turn(key: Tensor, position: int) -> Tensor:
        return rerotate_keys_reference(key[:, None], torch.tensor([position]), freq)[:, 0]

    numbers = {row: number for number, row in enumerate(rows.tolist())}
    for chunk in range(int(kind.max()) + 1):
        tokens = (kind == chunk).nonzero()[:, 0].tolist()
        # Its first four were attention sinks, which says nothing about the others.
        mine = [token for token in tokens[4:] if token in numbers]
        if not mine:
            continue
        share = strength / (len(mine) + 6.0)
        delta_v = share * sum(v[:, numbers[t]] - stored_v[:, t] for t in mine)
        delta_k = share * sum(turn(k[:, numbers[t]] - stored_k[:, t], -t) for t in mine)
        for token in tokens:
            stored_v[:, token] += delta_v
            stored_k[:, token] += turn(delta_k, token)
