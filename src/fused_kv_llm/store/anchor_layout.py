"""Names, shapes and dtypes of the tensors in a chunk's anchor sidecar, so that one that does not fit is not used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AnchorLayout", "layers_without_scores", "scale_group"]

_LARGEST_GROUP = 64
"""Channels that share a scale and a minimum in four bits, at most."""

_Forms = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class AnchorLayout:
    """What decides the shapes and dtypes of a chunk's anchors.

    Parameters
    ----------
    layers : sequence of int
        Those that score, ascending.
    dtype : torch.dtype
        Of the chunk's KV.
    num_tokens : int
        Of the chunk.
    room : tuple of int
        KV heads, and numbers of a key and of a value.
    """

    layers: Sequence[int]
    dtype: torch.dtype
    num_tokens: int
    room: tuple[int, int, int]

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a sidecar's tensors have these shapes and dtypes, and its positions are ascending and in the chunk.

        Parameters
        ----------
        tensors : mapping of str to Tensor
        """
        positions = tensors.get("positions")
        if positions is None or positions.dim() != 1:
            return False
        forms = {name: (tuple(part.shape), part.dtype) for name, part in tensors.items()}
        storage = "int4" if "values_least" in forms else "int8" if "values_scale" in forms else "auto"
        if forms != self._forms(positions.shape[0], storage):
            return False
        bounds = torch.tensor([-1]), positions.long(), torch.tensor([self.num_tokens])
        return bool((torch.cat(bounds).diff() > 0).all())

    def _forms(self, anchors: int, storage: str) -> _Forms:
        heads, key_dim, value_dim = self.room
        below = max(self.layers)
        others = len(layers_without_scores(self.layers, below))
        forms: _Forms = {"positions": ((anchors,), torch.int32)}
        for name, shape in (
            ("other_keys", (others, heads, anchors, key_dim)),
            ("values", (below, heads, anchors, value_dim)),
            ("scored_keys", (len(self.layers), heads, self.num_tokens, key_dim)),
        ):
            forms |= self._forms_of(name, shape, storage)
        return forms

    def _forms_of(self, name: str, shape: tuple[int, int, int, int], storage: str) -> _Forms:
        if storage == "auto":
            return {name: (shape, self.dtype)}
        layers, heads, tokens, dim = shape
        of_tokens, of_channels = (layers, heads, tokens, 1), (layers, heads, 1, dim)
        if storage == "int8":
            scale = of_tokens if name == "values" else of_channels
            return {name: (shape, torch.int8), f"{name}_scale": (scale, torch.float16)}
        group = scale_group(dim)
        groups = -(-dim // group)
        side = (layers, heads, tokens, groups), torch.float16
        forms: _Forms = {
            name: ((layers, heads, tokens, groups * group // 2), torch.uint8),
            f"{name}_scale": side,
            f"{name}_least": side,
        }
        return forms if name == "values" else forms | {f"{name}_mean": (of_channels, torch.float16)}


def layers_without_scores(layers: Sequence[int], below: int) -> list[int]:
    """Return the layers below one that do not score."""
    return [layer for layer in range(below) if layer not in layers]


def scale_group(dim: int) -> int:
    """Return the size of even groups, all as large, that have the channels without much padding."""
    group = -(-dim // -(-dim // _LARGEST_GROUP))
    return group + group % 2
