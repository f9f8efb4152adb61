"""Adding context shifts: what neighbours change in a chunk is added to its KV with the weight of its place.

The first chunk of a prompt stays as it is stored; later ones are shifted, the more the further back they stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fused_kv_kernels import ChunkShift, ShiftStack
from fused_kv_llm.model import FusedCache, Geometry

from .chunk_changes import ChunkChanges
from .placed_chunk import PlacedChunk

__all__ = ["ShiftSink"]


class ShiftSink:
    """Takes layers of a request's context shifts as they are stored, and adds them to placed chunks one by one.

    Parameters
    ----------
    chunks : sequence of PlacedChunk
        In prompt order.
    header_tokens : int
        Tokens of the header, which every chunk was prefilled after.
    cache : FusedCache
    geometry : Geometry
        How the model rotates keys.
    changes : ChunkChanges or None
        Where it is noted what was added.
    """

    def __init__(
        self,
        chunks: Sequence[PlacedChunk],
        header_tokens: int,
        cache: FusedCache,
        geometry: Geometry,
        changes: ChunkChanges | None = None,
    ) -> None:
        weights = [chunk.shift_weight(header_tokens) for chunk in chunks]
        self._shifted = [
            (number, chunk, weight)
            for number, (chunk, weight) in enumerate(zip(chunks, weights, strict=True))
            if weight > 0
        ]
        self._cache = cache
        self._geometry = geometry
        self._changes = changes
        self._stack = ShiftStack([], [])
        self._numbers = list[int]()
        self.layers = range(0)

    @property
    def keys(self) -> list[str]:
        """Keys of the chunks that are shifted, each once."""
        return list(dict.fromkeys(chunk.stored.key for _, chunk, _ in self._shifted))

    def receive(self, layers: range, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take some layers of the context shifts; they replace what was received before.

        Parameters
        ----------
        layers : range
        parts : mapping of str to mapping of str to Tensor
            By chunk key, the tensors of :func:`fused_kv_llm.context_shift.context_shift`. A chunk without any stays as
            it is stored.
        """
        shifts, deltas, self._numbers = [], [], []
        for number, chunk, weight in self._shifted:
            part = parts.get(chunk.stored.key)
            if part is not None:
                keys, values = ((part[name], part[f"{name}_scale"]) for name in ("keys", "values"))
                shifts.append(ChunkShift(chunk.segment.start, chunk.inside, weight, keys, values))
                deltas.append(chunk.delta)
                self._numbers.append(number)
        tables = self._geometry.tables(torch.tensor(deltas, dtype=torch.int64), self._cache.keys.device)
        self._stack = ShiftStack(shifts, tables[layers.start : layers.stop])
        self.layers = layers

    def add(self, layer_idx: int) -> None:
        """Add one of the received layers to the chunks that stand in the cache."""
        layer = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        self._stack.add(layer_idx - self.layers.start, *layer)
        if self._changes is not None and self._numbers:
            self._changes.shift(layer_idx, self._numbers, self._stack.weights)
