"""The context shift of a chunk: what chunks before it change in its KV.

FusionRAG (section 3.1, equation 10) stores the KV that a chunk has after its neighbours. But in a prompt the first
chunk has none before it and the second has one: there, that KV is further off than the plain one, prefilled after the
header alone. So the plain KV is stored, and a sidecar beside it keeps the difference as eight-bit integers. At query
time it is added with the weight of the chunk's place. (A product of low rank would be smaller, but rank 8 lost more on
some questions than preprocessing won.)

FusionRAG puts a chunk behind the stored KV of its neighbours, each of which begins with attention sinks of its own, as
none does in a prompt. Here similar chunks are prefilled as one prompt, so that each is seen as prompts have it.
Much of what one prompt changes is particular to it, and of that a shift fitted to several prompts has less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_kv_kernels import RotationTable, add_change, compress_rows

__all__ = ["CONTEXT_SHIFT", "USUAL_WEIGHT", "ShiftFit", "context_shift", "place_weight", "shift_name"]

CONTEXT_SHIFT = "shift-int8"
"""How the names of all context shifts begin."""

USUAL_WEIGHT = 0.8
"""Of a chunk's place: the mean over the second to the tenth of ten equal chunks."""

_PULL = 0.15
"""Weight of the assumption that nothing changes, in squared weights of places; measured in docs/experiments.md."""


def shift_name(num_neighbours: int, prompts: int) -> str:
    """Return the name of the sidecar with a chunk's context shift.

    Parameters
    ----------
    num_neighbours : int
        Of each chunk, along which groups were made.
    prompts : int
        That each chunk was put into. Shifts that were made in another way have another name and are not used.
    """
    way = f"{prompts}-prompts" if prompts > 1 else "1-prompt-and-half-again"
    return f"{CONTEXT_SHIFT}-{way}-{num_neighbours}-pull-{round(100 * _PULL)}"


class ShiftFit:
    """The shift that explains best, with the weights of its places, what prompts change in a chunk.

    Where ``d`` is the change and ``w`` the weight of a place, it is ``sum(w d) / (pull + sum(w^2))``: a fit by least
    squares, drawn towards no shift by a pull of 0.15. Prompts are summed up, so that many of them take no more memory
    than one.

    Parameters
    ----------
    keys, values : Tensor
        ``[L, Hkv, T, D]`` of the chunk with nothing before it but the header.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._plain = keys, values
        self._sums: tuple[Tensor | None, Tensor | None] = None, None
        self._power = _PULL

    def add(self, keys: Tensor, values: Tensor, weight: float, tables: Sequence[RotationTable] = ()) -> None:
        """Take a prompt into account.

        Parameters
        ----------
        keys, values : Tensor
            ``[L, Hkv, T, D]`` of the chunk there.
        weight : float
            Of its place there (:func:`place_weight`).
        tables : sequence of RotationTable
            By what the keys of each layer are moved to the positions of the plain ones, if they stand elsewhere.
        """
        (plain_keys, plain_values), (key_sums, value_sums) = self._plain, self._sums
        self._sums = (
            add_change(key_sums, keys, plain_keys, weight, tables),
            add_change(value_sums, values, plain_values, weight),
        )
        self._power += weight**2

    def shift(self) -> tuple[Tensor, Tensor]:
        """Return the shift of keys and values, float32 ``[L, Hkv, T, D]``."""
        keys, values = (total / self._power for total in self._totals())
        return keys, values

    def compressed(self) -> dict[str, Tensor]:
        """Return the shift in eight bits, as :func:`context_shift` makes it."""
        side = context_shift(*self._totals())
        # Bytes are the same whatever all of a row is divided by.
        return {name: part / self._power if name.endswith("_scale") else part for name, part in side.items()}

    def applied(self, weight: float) -> tuple[Tensor, Tensor]:
        """Return the keys and values with a part of their shift, float32 ``[L, Hkv, T, D]``.

        Parameters
        ----------
        weight : float
            Of a place (:func:`place_weight`).
        """
        shifts = zip(self._plain, self.shift(), strict=True)
        keys, values = (torch.add(plain, shift, alpha=weight) for plain, shift in shifts)
        return keys, values

    def _totals(self) -> tuple[Tensor, Tensor]:
        """Return the sums over all prompts; they are not to be changed."""
        keys, values = (
            torch.zeros_like(plain, dtype=torch.float32) if total is None else total
            for total, plain in zip(self._sums, self._plain, strict=True)
        )
        return keys, values


def context_shift(keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Compress what contexts change in a chunk.

    Parameters
    ----------
    keys, values : Tensor
        float32 ``[L, Hkv, T, D]``, see :class:`ShiftFit`.

    Returns
    -------
    dict of str to Tensor
        ``keys`` and ``values``, int8 ``[L, Hkv, T, D]``, and ``keys_scale`` and ``values_scale``, float32
        ``[L, Hkv, T, 1]``, to be multiplied with them.
    """
    side = {}
    for name, difference in (("keys", keys), ("values", values)):
        side[name], side[f"{name}_scale"] = compress_rows(difference)
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
