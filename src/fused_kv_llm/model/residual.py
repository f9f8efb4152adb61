"""The residual stream in float32, beside the rounded hidden states that transformers hands from layer to layer.

A decoder layer adds to what it is given, twice. In bfloat16 each sum is rounded to eight bits, though what is added is
small beside it. That is most of a bfloat16 model's rounding error, and what is recomputed differs from a full prefill
by it, however much is recomputed. So layers that the engine computes keep the sums in float32. Hidden states have the
model's dtype all the same: whoever looks at them sees what they expect, and whoever changes them is obeyed.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ResidualStream"]


class ResidualStream:
    """What the last layer of a pass gave, before it was rounded.

    Attributes
    ----------
    is_private : bool
        Whether nobody stands between the layers who could change hidden states in place.
    """

    def __init__(self) -> None:
        self.is_private = False
        self._kept: tuple[Tensor, Tensor] | None = None

    def of(self, hidden: Tensor, *, unchanged: bool = False) -> Tensor:
        """Return hidden states in float32 as they were before they were rounded, or themselves if that is not known.

        Parameters
        ----------
        hidden : Tensor
            ``[B, R, H]``. Known by identity, since whatever was made of them is another tensor.
        unchanged : bool
            Whether they are known not to have been changed in place. Otherwise they are compared, and elements that
            were changed are what they are now.
        """
        if self._kept is None or self._kept[0] is not hidden:
            return hidden
        exact = self._kept[1]
        return exact if unchanged else torch.where(exact.to(hidden.dtype) == hidden, exact, hidden.float())

    def keep(self, exact: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what a layer gives, float32 ``[B, R, H]``, rounded to a dtype, and remember it."""
        rounded = exact.to(dtype)
        self._kept = rounded, exact
        return rounded

    def narrow(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return some rows of hidden states, by ascending indices, and remember what they were."""
        exact, narrowed = self.of(hidden, unchanged=self.is_private), hidden.index_select(-2, rows)
        if exact is not hidden:
            self._kept = narrowed, exact.index_select(-2, rows)
        return narrowed

    def forget(self) -> None:
        """Remember nothing any more."""
        self._kept = None
