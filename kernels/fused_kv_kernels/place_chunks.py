"""Placing chunks: stored chunk KV into a layer of a cache, keys moved to their positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .native import native_place_chunks, supports
from .rotate import rerotate_keys

__all__ = ["place_chunks"]


def place_chunks(
    chunks: Sequence[tuple[Tensor, Tensor]],
    starts: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
) -> None:
    """Write the KV of several chunks into one layer, each chunk's keys rotated by one distance.

    Parameters
    ----------
    chunks : sequence of (Tensor, Tensor)
        Keys and values ``[Hkv, T, D]`` of every chunk, in any floating dtype.
    starts : sequence of int
        Where each chunk begins in the layer.
    cos, sin : Tensor
        float32 ``[len(chunks), rotary / 2]``: :func:`fused_kv_kernels.rotation_tables` of the chunks' distances.
    layer_keys, layer_values : Tensor
        ``[Hkv, N, D]``, written in place.
    """
    if not chunks:
        return
    tensors = [tensor for pair in chunks for tensor in pair]
    rows_dense = all(t.stride(1) == t.shape[2] for t in (*tensors, layer_keys, layer_values))
    if rows_dense and supports(*tensors, layer_keys, layer_values):
        native_place_chunks(chunks, starts, cos, sin, layer_keys, layer_values)
        return
    # All chunks are rotated in one go: chunk by chunk, dispatching would cost more than rotating.
    lengths = torch.tensor([keys.shape[1] for keys, _ in chunks], device=cos.device)
    tables = (cos.repeat_interleave(lengths, dim=0), sin.repeat_interleave(lengths, dim=0))
    moved = rerotate_keys(torch.cat([keys for keys, _ in chunks], dim=1).to(layer_keys.device), *tables)
    begin = 0
    for (keys, values), start in zip(chunks, starts, strict=True):
        end = begin + keys.shape[1]
        layer_keys[:, start : start + keys.shape[1]] = moved[:, begin:end]
        layer_values[:, start : start + keys.shape[1]] = values
        begin = end
