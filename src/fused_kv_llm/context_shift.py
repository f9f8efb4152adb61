"""The context shift of a chunk: what similar chunks before it change in its KV, as a small product of two matrices.

FusionRAG (section 3.1, equation 10) stores the KV that a chunk has after its neighbours. But in a prompt the first
chunk has none before it and the second has one: there, that KV is further off than the plain one, prefilled after the
header alone. So the plain KV is stored, and a side file beside it keeps the difference: for every layer, with keys
turned back to position 0, the ``[tokens, heads * head_dim]`` matrix ``after neighbours - plain`` as a product of rank
8. Most of the difference is common to the chunk's tokens or belongs to its first ones, which a few directions hold;
what they leave out is mostly the neighbours' own, and measured no better. At query time the difference is added with
the weight of the chunk's place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_kernels import rerotate_keys, rotation_tables

__all__ = ["CONTEXT_SHIFT", "context_shift", "place_weight"]

CONTEXT_SHIFT = "shift-8"
"""Name of the side file; the rank is part of it."""

_RANK = 8
_SPARE = 8


def context_shift(plain: tuple[Tensor, Tensor], shifted: tuple[Tensor, Tensor], inv_freq: Tensor) -> dict[str, Tensor]:
    """Compress the difference of a chunk's two forms.

    Parameters
    ----------
    plain, shifted : tuple of Tensor
        Keys and values ``[L, Hkv, T, D]``, with the rotation of the same positions.
    inv_freq : Tensor
        ``[rotary / 2]``.

    Returns
    -------
    dict of str to Tensor
        ``keys_left``, ``values_left`` ``[L, T, r]`` and ``keys_right``, ``values_right`` ``[L, r, Hkv * D]`` in the
        KV's dtype, with ``r`` at most 8. The keys' is turned so that all tokens stand where the first one does.
    """
    keys, values = (after.float() - before.float() for after, before in zip(shifted, plain, strict=True))
    cos, sin = (table.to(keys.device) for table in rotation_tables(torch.arange(keys.shape[2]), inv_freq))
    side = {}
    for name, part in (("keys", rerotate_keys(keys, cos, -sin)), ("values", values)):
        left, right = _factors(part.transpose(1, 2).flatten(2))
        side[f"{name}_left"], side[f"{name}_right"] = left.to(plain[0].dtype), right.to(plain[0].dtype)
    return side


def _factors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[L, T, r]`` and ``[L, r, N]`` whose product is close to the best one of that rank of ``[L, T, N]``.

    One round of subspace iteration from fixed random directions (Halko, Martinsson and Tropp 2011, algorithm 4.3):
    an SVD of every layer would take longer than the chunk's prefill.
    """
    tokens, width = matrix.shape[1:]
    rank = min(_RANK, tokens, width)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn((width, min(rank + _SPARE, tokens, width)), generator=generator).to(matrix.device)
    basis = torch.linalg.qr(matrix @ (matrix.transpose(1, 2) @ (matrix @ start))).Q
    small = basis.transpose(1, 2) @ matrix
    best = torch.linalg.eigh(small @ small.transpose(1, 2)).eigenvectors[:, :, -rank:]
    return basis @ best, best.transpose(1, 2) @ small


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
