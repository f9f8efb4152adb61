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
    """What the last layer of a pass gave, before it was rounded."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None
        self._is_exposed = False

    def of(self, hidden: Tensor, *, exposed: bool = True) -> Tensor:
        """Return hidden states in float32 as they were before they were rounded, or themselves if that is not known.

        Parameters
        ----------
        hidden : Tensor
            ``[B, R, H]``. Known by identity, since whatever was made of them is another tensor.
        exposed : bool
            Whether somebody may have changed them in place; then they are compared.
        """
        if self._kept is None or self._kept[0] is not hidden:
            return hidden
        exact = self._kept[1]
        if (exposed or self._is_exposed) and not torch.equal(exact.to(hidden.dtype), hidden):
            self.forget()
            return hidden
        return exact

    def keep(self, exact: Tensor, dtype: torch.dtype, *, exposed: bool = True) -> Tensor:
        """Return what a layer gives, float32 ``[B, R, H]``, rounded to a dtype, and remember it.

        Where it is `exposed`, somebody may change it in place before the next layer.
        """
        rounded = exact.to(dtype)
        self._kept, self._is_exposed = (rounded, exact), exposed
        return rounded

    def narrow(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return some rows of hidden states, by ascending indices, and remember what they were."""
        exact, narrowed = self.of(hidden), hidden.index_select(-2, rows)
        if exact is not hidden:
            self._kept = narrowed, exact.index_select(-2, rows)
        return narrowed

    def forget(self) -> None:
        """Remember nothing any more."""
        self._kept = None
