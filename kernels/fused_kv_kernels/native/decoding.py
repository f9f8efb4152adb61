"""The native decode attention as functions of tensors. Callers check shapes and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .library import int64_array, kept_array, loaded_library, num_threads
from .moving import Table

if TYPE_CHECKING:
    from fused_kv_kernels.scoring import Scoring

__all__ = ["cache_table", "decode_attention_scratch", "native_decode_attention"]


def cache_table(caches: Sequence[tuple[Tensor, Tensor]], positions: Sequence[int]) -> Table:
    """Return how :func:`native_decode_attention` takes caches ``[L, 1, Hkv, N, D]``; they must outlive it."""
    flat: list[int] = []
    for (keys, values), position in zip(caches, positions, strict=True):
        steps = (keys.stride(0), keys.stride(2), values.stride(0), values.stride(2))
        flat += (keys.data_ptr(), values.data_ptr(), *steps, position)
    return int64_array(*flat)


def decode_attention_scratch(dtype: torch.dtype, entries: Table, shape: tuple[int, ...]) -> int:
    """Return the bytes of working memory that :func:`native_decode_attention` needs.

    The shape is query heads, key heads, rows and the widths of keys and of values.
    """
    return int(loaded_library(dtype).fkv_decode_attention_scratch(entries, kept_array(shape)))


def native_decode_attention(
    q: Tensor, k: Tensor, v: Tensor, entries: Table, layer: int, first_keys: Tensor | None, scoring: Scoring,
    scratch: Tensor,
) -> Tensor:  # fmt: skip
    """Return :func:`fused_kv_kernels.decode_attention` of ``[1, H, R, D]``, any strides but the last.

    The entries are those of :func:`cache_table`, first keys int64 and dense, and `scratch` has at least
    :func:`decode_attention_scratch` bytes.
    """
    _, q_heads, rows, dim = q.shape
    value_dim = v.shape[3]
    out = torch.empty(1, rows, q_heads, value_dim, dtype=q.dtype)
    sinks = None if scoring.sinks is None else scoring.sinks.to(torch.float32).contiguous()
    loaded_library(q.dtype).fkv_decode_attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        entries,
        layer,
        None if first_keys is None else first_keys.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        scratch.data_ptr(),
        kept_array((q_heads, k.shape[1], rows, dim, value_dim)),
        kept_array((*q.stride()[1:3], *k.stride()[1:3], *v.stride()[1:3])),
        scoring.scale,
        scoring.softcap or 0.0,
        num_threads(),
    )
    return out.transpose(1, 2)
