"""Low-rank shifts of chunk KV: what a context changes in a chunk, kept as a small product of two matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .native import native_add_low_rank, supports
from .rotate import rerotate_keys

__all__ = ["LowRankShift", "add_low_rank"]

# What the native operator keeps of a right factor on its stack.
_LARGEST_RANK_TIMES_DIM = 8192


@dataclass(frozen=True)
class LowRankShift:
    """What is added to one chunk's KV, in all layers.

    Parameters
    ----------
    start : int
        Position of its first token.
    keys, values : tuple of Tensor
        Left ``[L, T, r]`` and right ``[L, Hkv, r, D]`` factors. The keys' product stands at rotary position 0.
    cos, sin : Tensor
        float32 ``[T, rotary / 2]``: what turns the keys' product to the tokens' positions.
    """

    start: int
    keys: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]
    cos: Tensor
    sin: Tensor

    @cached_property
    def _first(self) -> list[tuple[int, int]]:
        """Address of every factor's first layer, and bytes from layer to layer."""
        factors = (part for pair in (self.keys, self.values) for part in pair)
        return [(part.data_ptr(), part.stride(0) * part.element_size()) for part in factors]

    def addresses(self, layer_idx: int) -> list[int]:
        """Return where one layer's factors and the tables lie, how many tokens there are, and the first one."""
        layer = [first + layer_idx * step for first, step in self._first]
        return [*layer, self.cos.data_ptr(), self.sin.data_ptr(), self.cos.shape[0], self.start]

    @cached_property
    def is_dense(self) -> bool:
        """Whether every layer's factors are contiguous bfloat16 on the CPU that the native operator takes."""
        factors = [part for pair in (self.keys, self.values) for part in pair]
        rank, dim = self.keys[1].shape[-2:]
        same_rank = self.values[1].shape[-2] == rank and rank * dim <= _LARGEST_RANK_TIMES_DIM
        return same_rank and all(part[0].is_contiguous() for part in factors) and supports(*factors[1::2])


def add_low_rank(shifts: Sequence[LowRankShift], layer_idx: int, layer_keys: Tensor, layer_values: Tensor) -> None:
    """Add the shifts of several chunks to one layer in place: ``K_j += R(p_j) (A B)_j`` and ``V_j += (A B)_j``.

    Parameters
    ----------
    shifts : sequence of LowRankShift
    layer_idx : int
    layer_keys, layer_values : Tensor
        ``[Hkv, N, D]``, changed in place.
    """
    if not shifts:
        return
    layer = (layer_keys, layer_values)
    one_rank = len({shift.keys[1].shape[2] for shift in shifts}) == 1 and all(shift.is_dense for shift in shifts)
    if one_rank and supports(*layer) and all(t.stride(1) == t.shape[2] for t in layer):
        native_add_low_rank(shifts, layer_idx, layer_keys, layer_values)
        return
    for shift in shifts:
        span = slice(shift.start, shift.start + shift.cos.shape[0])
        (key_left, key_right), (value_left, value_right) = (
            (left[layer_idx].float(), right[layer_idx].float()) for left, right in (shift.keys, shift.values)
        )
        layer_keys[:, span] += rerotate_keys(key_left @ key_right, shift.cos, shift.sin).to(layer_keys.dtype)
        layer_values[:, span] += (value_left @ value_right).to(layer_values.dtype)
