"""The context shift of a chunk: what similar chunks before it change in its KV.

FusionRAG (section 3.1, equation 10) stores the KV that a chunk has after its neighbours. But in a prompt the first
chunk has none before it and the second has one: there, that KV is further off than the plain one, prefilled after the
header alone. So the plain KV is stored, and a sidecar beside it keeps the difference as eight-bit integers. At query
time it is added with the weight of the chunk's place. (A product of low rank would be smaller, but rank 8 lost more on
some questions than preprocessing won.)

About half of what one context changes is particular to it. The prompt's chunks are others, and there it is only an
error: the mean over several contexts has less of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CONTEXT_SHIFT", "context_shift", "mean_shift", "place_weight", "shift_name"]

CONTEXT_SHIFT = "shift-int8"
"""How the names of all context shifts begin."""

_LARGEST = 127
_SMALLEST_SCALE = 1e-30


def shift_name(num_neighbours: int) -> str:
    """Return the name of the sidecar with a chunk's context shift.

    Parameters
    ----------
    num_neighbours : int
        Similar chunks that it was made with, separators between them. Shifts of stores that were made without have
        another name and are not used.
    """
    return f"{CONTEXT_SHIFT}-separated-{num_neighbours}"


def mean_shift(plain: tuple[Tensor, Tensor], shifted: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return what contexts change in a chunk, on average.

    Parameters
    ----------
    plain : tuple of Tensor
        Keys and values ``[L, Hkv, T, D]`` of the chunk with nothing before it but the header.
    shifted : sequence of tuple of Tensor
        The same after each context, with the rotation of the same positions; not empty.

    Returns
    -------
    tuple of Tensor
        Keys and values, float32 ``[L, Hkv, T, D]``.
    """
    keys, values = (
        sum((form.float() for form in after[1:]), after[0].float()) / len(after) - before.float()
        for before, *after in zip(plain, *shifted, strict=True)
    )
    return keys, values


def context_shift(keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Compress what contexts change in a chunk.

    Parameters
    ----------
    keys, values : Tensor
        float32 ``[L, Hkv, T, D]``, see :func:`mean_shift`.

    Returns
    -------
    dict of str to Tensor
        ``keys`` and ``values``, int8 ``[L, Hkv, T, D]``, and ``keys_scale`` and ``values_scale``, float32
        ``[L, Hkv, T, 1]``, to be multiplied with them.
    """
    side = {}
    for name, difference in (("keys", keys), ("values", values)):
        scale = (difference.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_SMALLEST_SCALE)
        side[name], side[f"{name}_scale"] = (difference / scale).round().to(torch.int8), scale
    return side


def place_weight(tokens_before: int, num_tokens: int) -> float:
    """Return how much of its shift a chunk gets at its place in a prompt, in [0, 1).

    Parameters
    ----------
    tokens_before : int
        Tokens between the header and the chunk.
    num_tokens : int
        The chunk's own: with equal chunks the first gets nothing, the second a half, the third two thirds.
    """
    return tokens_before / (tokens_before + num_tokens)
