"""The native attention of CPUs as functions of tensors. Callers check shapes and positions."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .library import int64_array, kept_array, loaded_library, num_threads

if TYPE_CHECKING:
    from fused_kv_kernels.row_plan import RowPlan
    from fused_kv_kernels.scoring import Scoring

__all__ = [
    "eight_bit_attention_scratch",
    "native_eight_bit_attention",
    "native_row_attention",
    "native_token_scores",
    "row_attention_scratch",
]


def native_row_attention(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, scoring: Scoring, scratch: Tensor) -> Tensor:
    """Return the attention of scattered rows, as :func:`fused_kv_kernels.row_attention` does.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, R, D]``, any strides but the last.
    k, v : Tensor
        ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]``, in the dtype of `q`.
    plan : RowPlan
    scoring : Scoring
    scratch : Tensor
        Working memory of at least :func:`row_attention_scratch` bytes.

    Returns
    -------
    Tensor
        ``[B, Hq, R, Dv]``, laid out ``[B, R, Hq, Dv]`` in memory, as an output projection reads it.
    """
    batch, q_heads, rows, _ = q.shape
    positions, first_keys, sinks = _scored_rows(plan.q_positions, plan.first_keys, scoring)
    out = torch.empty(batch, rows, q_heads, v.shape[3], dtype=q.dtype).transpose(1, 2)
    loaded_library(q.dtype).fkv_row_attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        _address(positions),
        _address(first_keys),
        _address(sinks),
        scratch.data_ptr(),
        kept_array(_attention_shape(q, k, v)),
        kept_array((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])),
        scoring.scale,
        scoring.softcap or 0.0,
        num_threads(),
    )
    return out


def _scored_rows(
    q_positions: Tensor, first_keys: Tensor | None, scoring: Scoring
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return positions, first keys and sinks as the operators read them; whoever passes addresses keeps them."""
    sinks = None if scoring.sinks is None else scoring.sinks.to(torch.float32).contiguous()
    return _whole(q_positions), _whole(first_keys), sinks


def _whole(numbers: Tensor | None) -> Tensor | None:
    """Return positions as the operators read them."""
    return None if numbers is None else numbers.to(torch.int64).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def row_attention_scratch(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the bytes of working memory that :func:`native_row_attention` needs."""
    return _scratch_nbytes(loaded_library(q.dtype), _attention_shape(q, k, v), num_threads())


@functools.lru_cache(maxsize=64)
def _scratch_nbytes(library: ctypes.CDLL, shape: tuple[int, ...], threads: int) -> int:
    return int(library.fkv_row_attention_scratch(kept_array(shape), threads))


def _attention_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    batch, q_heads, rows, dim = q.shape
    return batch, q_heads, k.shape[1], rows, k.shape[2], dim, v.shape[3]


def native_eight_bit_attention(q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, scale: float, scratch: Tensor) -> Tensor:
    """Return about what :func:`native_row_attention` does, for scores without a cap and without sinks.

    Parameters
    ----------
    q, k, v, plan
        As there.
    scale : float
        Multiplies the products; positive.
    scratch : Tensor
        Working memory of at least :func:`eight_bit_attention_scratch` bytes.
    """
    batch, q_heads, rows, _ = q.shape
    positions, first_keys = _whole(plan.q_positions), _whole(plan.first_keys)
    out = torch.empty(batch, rows, q_heads, v.shape[3], dtype=q.dtype).transpose(1, 2)
    loaded_library(q.dtype).fkv_eight_bit_attention(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        _address(positions),
        _address(first_keys),
        scratch.data_ptr(),
        kept_array(_attention_shape(q, k, v)),
        kept_array((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])),
        scale,
        num_threads(),
    )
    return out


def eight_bit_attention_scratch(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the bytes of working memory that :func:`native_eight_bit_attention` needs, or -1 where it cannot run."""
    return _eight_bit_scratch_nbytes(loaded_library(q.dtype), _attention_shape(q, k, v))


@functools.lru_cache(maxsize=64)
def _eight_bit_scratch_nbytes(library: ctypes.CDLL, shape: tuple[int, ...]) -> int:
    return int(library.fkv_eight_bit_attention_scratch(kept_array(shape)))


def native_token_scores(
    q: Tensor, k: Tensor, q_positions: Tensor, first_keys: Tensor | None, scoring: Scoring
) -> Tensor:
    """Return the attention mass of every key, as :func:`fused_kv_kernels.token_scores` does.

    Parameters
    ----------
    q : Tensor
        ``[Hq, R, D]``.
    k : Tensor
        ``[Hkv, N, D]``, in the dtype of `q`.
    q_positions : Tensor
        int64 ``[R]``, ascending.
    first_keys : Tensor or None
        int64 ``[R]``, not descending.
    scoring : Scoring

    Returns
    -------
    Tensor
        float32 ``[N]``.
    """
    positions, firsts, sinks = _scored_rows(q_positions, first_keys, scoring)
    out = torch.empty(k.shape[1], dtype=torch.float32)
    loaded_library(q.dtype).fkv_token_scores(
        q.data_ptr(),
        k.data_ptr(),
        _address(positions),
        _address(firsts),
        _address(sinks),
        out.data_ptr(),
        int64_array(q.shape[0], k.shape[0], q.shape[1], k.shape[1], k.shape[2]),
        int64_array(*q.stride()[:2], *k.stride()[:2]),
        scoring.scale,
        scoring.softcap or 0.0,
        num_threads(),
    )
    return out
