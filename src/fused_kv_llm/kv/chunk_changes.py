"""What a request changes in the KV of its chunks, in a form that does not need a copy of it.

Fusing adds a context shift to a chunk with a weight a layer, and deviation transfer adds a vector a layer and head. A
request that is to share its chunks' pages needs both; they are noted as they are added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_kv_llm.model import Geometry

__all__ = ["ChunkChanges"]


class ChunkChanges:
    """Weights and vectors that were added to each of a request's chunks.

    Parameters
    ----------
    num_chunks : int
    geometry : Geometry
        Of layers that all have the same shape.
    """

    def __init__(self, num_chunks: int, geometry: Geometry) -> None:
        heads, *dims = geometry.room
        # Not of the pass that notes them: a tensor of inference mode could not be added to outside of it.
        with torch.inference_mode(mode=False):
            self._weights = torch.zeros(num_chunks, geometry.num_layers, 2)
            keys, values = (torch.zeros(geometry.num_layers, heads, num_chunks, dim) for dim in dims)
        self._vectors = keys, values
        self._shifted: set[int] = set()

    def shift(self, layer_idx: int, numbers: Sequence[int], weights: Tensor) -> None:
        """Note that shifts were added to a layer.

        Parameters
        ----------
        layer_idx : int
        numbers : sequence of int
            Of the chunks, counted as they stand in the prompt.
        weights : Tensor
            float32 ``[2, len(numbers)]``: of their keys' shifts and of their values'.
        """
        self._shifted.update(numbers)
        self._weights[list(numbers), layer_idx] += weights.T

    def vector_totals(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return what is to be added to: sums of a layer's vectors, as ``transfer_deviation`` takes its `totals`."""
        keys, values = self._vectors
        return keys[layer_idx], values[layer_idx]

    def weights_of(self, number: int) -> Tensor | None:
        """Return one chunk's weights, float32 ``[L, 2]``; None if it was not shifted."""
        return self._weights[number].clone() if number in self._shifted else None

    def vectors_of(self, number: int) -> tuple[Tensor, Tensor] | None:
        """Return one chunk's vectors, float32 ``[L, Hkv, D]`` and ``[L, Hkv, Dv]``; None if nothing was transferred."""
        keys, values = (part[:, :, number].contiguous() for part in self._vectors)
        return (keys, values) if bool(keys.any()) or bool(values.any()) else None
