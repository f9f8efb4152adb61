"""The native decode attention over chunk views, as functions of tensors. Callers check shapes and positions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .decoding import cache_table
from .library import int64_array, kept_array, loaded_library, num_threads
from .moving import Table

if TYPE_CHECKING:
    from fused_kv_kernels.chunk_views import ChunkView, LayerRotations, SequenceView, SharedChunk
    from fused_kv_kernels.scoring import Scoring

__all__ = ["ViewTables", "native_decode_views", "view_tables"]


@dataclass(slots=True)
class ViewTables:
    """How :func:`native_decode_views` takes sequences: tables of addresses and counts, which layers have in common.

    Parameters
    ----------
    caches, chunks, views, spans : Table
        As ``decode_views.cpp`` says.
    num_chunks, num_views, num_spans : int
    rotations : LayerRotations
    waves : Tensor
        The rotations' waves for the longest chunk, in the dtype of the caches.
    sequences : list of SequenceView
        Whose tensors the tables have the addresses of.
    """

    caches: Table
    chunks: Table
    views: Table
    spans: Table
    num_chunks: int
    num_views: int
    num_spans: int
    rotations: LayerRotations
    waves: Tensor
    sequences: list[SequenceView]
    scratch: dict[tuple[int, ...], Tensor] = field(default_factory=dict)


def view_tables(sequences: Sequence[SequenceView], own_rows: Sequence[int]) -> ViewTables:
    """Return how :func:`native_decode_views` takes sequences, whose tensors are dense."""
    of_cache, of_chunk = _span_sizes(sequences[0].keys.dtype)
    by_chunk: dict[int, tuple[SharedChunk, list[list[int]]]] = {}
    spans, total = list[int](), 0
    for row, (one, own_row) in enumerate(zip(sequences, own_rows, strict=True)):
        before = own_row // of_cache + 1
        for number, view in enumerate(one.chunks):
            entry = [row, before, *_view_numbers(view, one.turns[number])]
            by_chunk.setdefault(id(view.chunk), (view.chunk, []))[1].append(entry)
            before += -(-view.chunk.num_tokens // of_chunk)
        spans += [total, before]
        total += before
    chunks, views = list[int](), list[int]()
    for chunk, entries in by_chunk.values():
        chunks += [*_chunk_numbers(chunk), len(views) // 8, len(entries)]
        views += [number for entry in entries for number in entry]
    longest = max((chunk.num_tokens for chunk, _ in by_chunk.values()), default=1)
    keys, rotations = sequences[0].keys, sequences[0].rotations
    return ViewTables(
        caches=cache_table([(one.keys, one.values) for one in sequences], own_rows),
        chunks=int64_array(*chunks),
        views=int64_array(*views),
        spans=int64_array(*spans),
        num_chunks=len(by_chunk),
        num_views=len(views) // 8,
        num_spans=total,
        rotations=rotations,
        waves=rotations.waves(longest, keys.shape[4], keys.dtype),
        sequences=list(sequences),
    )


@functools.lru_cache(maxsize=4)
def _span_sizes(dtype: torch.dtype) -> tuple[int, int]:
    """Return how many keys of a cache, and tokens of a chunk, the operator takes at a time."""
    sizes = int64_array(0, 0)
    loaded_library(dtype).fkv_span_sizes(sizes)
    return sizes[0], sizes[1]


def _chunk_numbers(chunk: SharedChunk) -> list[int]:
    keys, values = chunk.keys, chunk.values
    shifts = [0] * 4 if chunk.shifts is None else [x.data_ptr() for pair in chunk.shifts for x in pair]
    return [keys.data_ptr(), values.data_ptr(), *keys.stride()[:2], *values.stride()[:2], chunk.num_tokens, *shifts]


def _view_numbers(view: ChunkView, turns: Tensor) -> list[int]:
    vectors = [0, 0] if view.vectors is None else [part.data_ptr() for part in view.vectors]
    weights = 0 if view.weights is None else view.weights.data_ptr()
    return [weights, *vectors, view.hidden.data_ptr(), view.hidden.shape[0], turns.data_ptr()]


def native_decode_views(q: Tensor, k: Tensor, v: Tensor, tables: ViewTables, layer: int, scoring: Scoring) -> Tensor:
    """Return :func:`fused_kv_kernels.decode_views` of ``[1, H, R, D]``, any strides but the last."""
    _, q_heads, rows, dim = q.shape
    value_dim, library, rotations = v.shape[3], loaded_library(q.dtype), tables.rotations
    shape = (q_heads, k.shape[1], rows, dim, value_dim)
    if shape not in tables.scratch:
        nbytes = library.fkv_decode_views_scratch(tables.num_spans, kept_array(shape))
        tables.scratch[shape] = torch.empty(nbytes, dtype=torch.uint8)
    out = torch.empty(1, rows, q_heads, value_dim, dtype=q.dtype)
    sinks = None if scoring.sinks is None else scoring.sinks.to(torch.float32).contiguous()
    kind = rotations.kind_of[layer]
    counts = (tables.num_chunks, tables.num_views, layer, kind, rotations.half, int(rotations.interleaved))
    library.fkv_decode_views(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        tables.caches,
        tables.chunks,
        tables.views,
        tables.spans,
        tables.waves[kind].data_ptr(),
        kept_array(counts),
        None if sinks is None else sinks.data_ptr(),
        tables.scratch[shape].data_ptr(),
        kept_array(shape),
        kept_array((*q.stride()[1:3], *k.stride()[1:3], *v.stride()[1:3])),
        scoring.scale,
        scoring.softcap or 0.0,
        num_threads(),
    )
    return out.transpose(1, 2)
