"""Masks by true position: a model's own mask functions, kept as functions.

transformers describes a mask by a function of a query's and a key's position, and builds a matrix of it. A fused pass
keeps the function: its rows are scattered, and the matrix would be as large as the scores. Every mask that is supported
hides what comes before some key, as sliding windows and attention chunks do, and what comes after the row itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from fused_kv_llm.errors import UnsupportedModelError

__all__ = ["CAUSAL", "MaskRule"]

_SAMPLED_ROWS = 8
_MOST_SAMPLED_KEYS = 1 << 17


class MaskRule:
    """Which keys a row sees.

    Parameters
    ----------
    function : callable
        A mask function of transformers: of batch, head, query position and key position, to whether it is seen.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __getitem__(self, rows: object) -> MaskRule:
        """Return itself: a model that goes on with some of its rows cuts its mask; this one goes by positions."""
        return self

    def sees(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return whether rows see keys: bool, of positions int64 that broadcast."""
        zero = rows.new_zeros(())
        seen = torch.as_tensor(self._function(zero, zero, rows, keys), device=rows.device)
        return seen.expand((rows + keys).shape)

    def first_keys(self, rows: Tensor, keys: Tensor, own: Tensor) -> Tensor | None:
        """Return the first key that each row sees.

        Parameters
        ----------
        rows : Tensor
            int64 ``[R]``: positions of the rows.
        keys : Tensor
            int64 ``[N]``, ascending: positions of the keys.
        own : Tensor
            int64 ``[R]``: each row's index among the keys.

        Returns
        -------
        Tensor or None
            int64 ``[R]``, indices among the keys; None if every row sees the very first.

        Raises
        ------
        UnsupportedModelError
            If a row does not see itself, or sees what comes after it.
        """
        if self._function is causal_mask_function or rows.shape[0] == 0:
            return None
        if not bool(self.sees(rows, rows).all()) or bool(self.sees(rows, rows + 1).any()):
            raise UnsupportedModelError(
                "A mask of the model lets tokens see what comes after them, or not themselves: its attention is not "
                "causal (config.is_causal, or token types of a prompt with images). Only causal decoders can be fused."
            )
        if bool(self.sees(rows, keys[:1]).all()):
            return None
        low, high = torch.zeros_like(own), own.clone()
        for _ in range(int(keys.shape[0]).bit_length()):
            middle = (low + high) // 2
            seen = self.sees(rows, keys[middle])
            high = torch.where(seen, middle, high)
            low = torch.where(seen, low, middle + 1)
        return high

    def hides_from(self, length: int) -> bool:
        """Return whether the last of `length` tokens does not see the first.

        Raises
        ------
        UnsupportedModelError
            If what sampled rows see is not one stretch of keys that ends with the row itself.
        """
        last = min(length, _MOST_SAMPLED_KEYS) - 1
        rows = torch.tensor(sorted({last * number // _SAMPLED_ROWS for number in range(_SAMPLED_ROWS + 1)}))
        keys = torch.arange(last + 1)
        first = self.first_keys(rows, keys, rows)
        first = torch.zeros_like(rows) if first is None else first
        stretch = (keys >= first[:, None]) & (keys <= rows[:, None])
        if not torch.equal(self.sees(rows[:, None], keys[None, :]), stretch):
            raise UnsupportedModelError(
                "A mask of the model hides keys between those that a token sees: only masks that hide what comes "
                "before a window or a chunk of tokens can be fused."
            )
        return not bool(self.sees(torch.tensor([length - 1]), torch.zeros(1, dtype=torch.int64)).all())


CAUSAL = MaskRule(causal_mask_function)
