"""Placing chunks: stored layers go to the positions of a request's cache that they fill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_kv_kernels import ChunkStack, place_chunks
from fused_kv_llm.model import FusedCache, Geometry
from fused_kv_llm.store import StoredLayers

from .placed_chunk import PlacedChunk

__all__ = ["ChunkSink"]

_Pair = tuple[Tensor, Tensor]


class ChunkSink:
    """Takes layers of a request's chunks as they are stored, and puts them into its cache one by one.

    On the way keys are rotated from the position where the chunk was prefilled to the one where it stands now, and
    eight-bit integers become the cache's dtype.

    Parameters
    ----------
    chunks : sequence of PlacedChunk
        In prompt order.
    cache : FusedCache
    geometry : Geometry
        How the model rotates keys.
    """

    def __init__(self, chunks: Sequence[PlacedChunk], cache: FusedCache, geometry: Geometry) -> None:
        self._chunks = chunks
        self._cache = cache
        self._starts = [chunk.segment.start for chunk in chunks]
        deltas = torch.tensor([chunk.delta for chunk in chunks], dtype=torch.int64)
        self._tables = geometry.tables(deltas, cache.keys.device)
        self._parts: Sequence[StoredLayers] = ()
        self._stack: ChunkStack | None = None
        self.layers = range(0)

    def receive(self, layers: range, parts: Sequence[StoredLayers]) -> None:
        """Take some layers of every chunk, in the order of the chunks; they replace what was received before.

        Parameters
        ----------
        layers : range
        parts : sequence of StoredLayers
            Keys ``[len(layers), Hkv, T, D]`` and values ``[len(layers), Hkv, T, Dv]`` of the whole chunks.
        """
        self.layers, self._parts = layers, parts
        if self._cache.keys.device.type == "cpu":
            chunks, scales = self._in_prompt(parts)
            tables = self._tables[layers.start : layers.stop]
            self._stack = ChunkStack(chunks, self._starts, tables, scales=scales)

    def place(self, layer_idx: int) -> None:
        """Write one of the received layers into the cache."""
        number = layer_idx - self.layers.start
        keys, values = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        if self._stack is not None:
            self._stack.place(number, keys, values)
            return
        # Whole layers are contiguous, so they are copied in one piece; the prompt's tokens are cut out on the device.
        chunks, scales = self._in_prompt([part.layer(number).to(keys.device) for part in self._parts])
        place_chunks(chunks, self._starts, self._tables[layer_idx], keys, values, scales)

    def _in_prompt(self, parts: Sequence[StoredLayers]) -> tuple[list[_Pair], list[_Pair] | None]:
        """Return keys and values ``[..., T, D]`` of the tokens that stand in the prompt, and eight bits' scales."""
        chunks, scales = [], []
        for chunk, part in zip(self._chunks, parts, strict=True):
            chunks.append((part.keys[..., chunk.inside, :], part.values[..., chunk.inside, :]))
            if part.scales is not None:
                scales.append((part.scales[0], part.scales[1][..., chunk.inside, :]))
        # All chunks of one identity are stored in one dtype.
        return chunks, scales or None
