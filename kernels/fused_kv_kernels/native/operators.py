"""The native CPU operators as functions of tensors. Callers check shapes and positions."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .library import int64_array, kept_array, loaded_library, native_library, num_threads

if TYPE_CHECKING:
    from fused_kv_kernels.rotate import RotationTable
    from fused_kv_kernels.row_plan import RowPlan
    from fused_kv_kernels.scoring import Scoring
    from fused_kv_kernels.shift_chunks import ChunkShift
    from fused_kv_kernels.transfer import TransferPlan

__all__ = [
    "Table",
    "chunk_table",
    "int8_chunk_table",
    "native_fit_sums",
    "native_place_chunks",
    "native_row_attention",
    "native_shift_chunks",
    "native_token_scores",
    "native_transfer",
    "row_attention_scratch",
    "shift_table",
    "supports",
    "supports_int8_rows",
    "supports_rows",
]

Pair = tuple[Tensor, Tensor]

Table = ctypes.Array[ctypes.c_int64]
"""Numbers and addresses, as the operators take what does not change from layer to layer."""

_LARGEST_DIM = 1024


def supports(*tensors: Tensor) -> bool:
    """Return whether the native operators take these tensors: of one dtype that has them, on the CPU, columns dense.

    The number of columns must be even, as products of bfloat16 take them in pairs.
    """
    dtype = tensors[0].dtype
    for t in tensors:
        columns = t.shape[-1]
        if t.dtype != dtype or not t.is_cpu or t.stride(-1) != 1 or columns % 2 or columns > _LARGEST_DIM:
            return False
    return native_library(dtype) is not None


def supports_rows(*tensors: Tensor) -> bool:
    """Return whether the native operators take ``[H, N, D]`` whose rows also lie one after another."""
    return all(t.stride(1) == t.shape[2] for t in tensors) and supports(*tensors)


def supports_int8_rows(chunks: Sequence[tuple[Tensor, Tensor]], scales: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether the native operators take chunks ``[..., Hkv, T, D]`` in eight bits with their float16 scales."""
    rows = [part for pair in chunks for part in pair]
    factors = [part for pair in scales for part in pair]
    dense_scales = all(keys.stride(-1) == 1 and values.stride(-2) == 1 for keys, values in scales)
    return (
        len(chunks) == len(scales)
        and all(t.dtype == torch.int8 and t.device.type == "cpu" for t in rows)
        and all(t.dtype == torch.float16 and t.device.type == "cpu" for t in factors)
        and all(t.stride(-1) == 1 and t.stride(-2) == t.shape[-1] <= _LARGEST_DIM for t in rows)
        and dense_scales
    )


def _layer(layer_keys: Tensor, layer_values: Tensor, table: RotationTable) -> tuple[int, ...]:
    """Return how the operators that rotate into a layer of a cache take it, and with how many threads."""
    heads, _, dim = layer_keys.shape
    addresses = (layer_keys.data_ptr(), layer_values.data_ptr())
    return (*addresses, layer_keys.stride(0), layer_values.stride(0), heads, dim, table.half, num_threads())


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
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return positions, first keys and sinks as the operators read them; whoever passes addresses keeps them."""
    firsts = None if first_keys is None else first_keys.to(torch.int64).contiguous()
    sinks = None if scoring.sinks is None else scoring.sinks.to(torch.float32).contiguous()
    return q_positions.to(torch.int64).contiguous(), firsts, sinks


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def row_attention_scratch(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the bytes of working memory that :func:`native_row_attention` needs."""
    return _scratch_nbytes(q.dtype, _attention_shape(q, k, v), num_threads())


@functools.lru_cache(maxsize=64)
def _scratch_nbytes(dtype: torch.dtype, shape: tuple[int, ...], threads: int) -> int:
    return int(loaded_library(dtype).fkv_row_attention_scratch(kept_array(shape), threads))


def _attention_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    batch, q_heads, rows, dim = q.shape
    return batch, q_heads, k.shape[1], rows, k.shape[2], dim, v.shape[3]


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
    out = torch.empty(k.shape[1])
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


def chunk_table(chunks: Sequence[tuple[Tensor, Tensor]], starts: Sequence[int]) -> Table:
    """Return how :func:`native_place_chunks` takes keys and values ``[L, Hkv, T, D]``; they must outlive it."""
    flat = [
        number
        for (keys, values), start in zip(chunks, starts, strict=True)
        for number in (
            keys.data_ptr(), values.data_ptr(), *keys.stride()[:2], *values.stride()[:2], keys.shape[2], start,
        )
    ]  # fmt: skip
    return int64_array(*flat)


def int8_chunk_table(
    chunks: Sequence[tuple[Tensor, Tensor]], scales: Sequence[tuple[Tensor, Tensor]], starts: Sequence[int]
) -> Table:
    """Return how :func:`native_place_chunks` takes int8 ``[L, Hkv, T, D]`` and their scales; they must outlive it."""
    flat: list[int] = []
    for pair, factors, start in zip(chunks, scales, starts, strict=True):
        tensors = (*pair, *factors)
        flat += [tensor.data_ptr() for tensor in tensors]
        flat += [step for tensor in tensors for step in tensor.stride()[:2]]
        flat += [pair[0].shape[2], start]
    return int64_array(*flat)


def native_place_chunks(
    entries: Table, count: int, layer: int, table: RotationTable, layer_keys: Tensor, layer_values: Tensor,
    *, int8: bool = False,
) -> None:  # fmt: skip
    """Rotate and copy one layer of `count` chunks into a cache, as :func:`fused_kv_kernels.place_chunks` does.

    The entries are those of :func:`chunk_table`, or of :func:`int8_chunk_table`.
    """
    library = loaded_library(layer_keys.dtype)
    place = library.fkv_place_int8_chunks if int8 else library.fkv_place_chunks
    angles = table.cos.data_ptr(), table.sin.data_ptr()
    place(entries, count, layer, *angles, *_layer(layer_keys, layer_values, table))


def native_transfer(
    plan: TransferPlan,
    table: RotationTable,
    fresh_keys: Tensor,
    fresh_values: Tensor,
    layer_keys: Tensor,
    layer_values: Tensor,
) -> None:
    """Correct one layer in place, as :func:`fused_kv_kernels.transfer_deviation` does."""

    fresh_rows, selected, bounds, spans = (
        part.to(torch.int64).contiguous() for part in (plan.fresh_rows, plan.selected, plan.bounds, plan.spans)
    )
    weights = plan.weights.to(torch.float32).contiguous()
    loaded_library(layer_keys.dtype).fkv_transfer(
        fresh_keys.data_ptr(),
        fresh_values.data_ptr(),
        int64_array(*fresh_keys.stride()[:2], *fresh_values.stride()[:2]),
        fresh_rows.data_ptr(),
        selected.data_ptr(),
        bounds.data_ptr(),
        spans.data_ptr(),
        weights.data_ptr(),
        spans.shape[0],
        table.cos.data_ptr(),
        table.sin.data_ptr(),
        *_layer(layer_keys, layer_values, table),
    )


def shift_table(shifts: Sequence[ChunkShift]) -> Table:
    """Return how :func:`native_shift_chunks` takes shifts; their tensors must outlive it."""
    flat: list[int] = []
    for shift in shifts:
        first, dim = shift.inside.start, shift.keys[0].shape[3]
        for whole, scale in (shift.keys, shift.values):
            flat += [whole.data_ptr() + first * dim, scale.data_ptr() + first * scale.element_size()]
        flat += [shift.keys[0].shape[2], shift.num_tokens, shift.start]
    return int64_array(*flat)


def native_shift_chunks(
    entries: Table, layer: int, weights: Tensor, table: RotationTable, layer_keys: Tensor, layer_values: Tensor
) -> None:
    """Add one layer of shifts to a cache, as :func:`fused_kv_kernels.shift_chunks` does; weights float32 [2, count]."""
    loaded_library(layer_keys.dtype).fkv_shift_chunks(
        entries,
        weights.shape[1],
        layer,
        weights.data_ptr(),
        table.cos.data_ptr(),
        table.sin.data_ptr(),
        *_layer(layer_keys, layer_values, table),
    )


def native_fit_sums(
    entries: Table, layer: int, table: RotationTable, plan: TransferPlan, bounds: Tensor, fresh: Pair, stored: Pair
) -> Tensor:
    """Return the inner products that :func:`fused_kv_kernels.fit_shifts` needs, float32 ``[count, Hkv, 4]``."""
    fresh_rows, selected = (rows.to(torch.int64).contiguous() for rows in (plan.fresh_rows, plan.selected))
    out = torch.empty(bounds.shape[0], stored[0].shape[0], 4)
    loaded_library(stored[0].dtype).fkv_fit_shifts(
        entries,
        bounds.shape[0],
        layer,
        table.cos.data_ptr(),
        table.sin.data_ptr(),
        fresh[0].data_ptr(),
        fresh[1].data_ptr(),
        int64_array(*fresh[0].stride()[:2], *fresh[1].stride()[:2]),
        fresh_rows.data_ptr(),
        selected.data_ptr(),
        bounds.data_ptr(),
        out.data_ptr(),
        *_layer(*stored, table),
    )
    return out
