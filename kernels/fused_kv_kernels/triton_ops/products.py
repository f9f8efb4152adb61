"""Matrix products of blocks, with the full precision of the operands' dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .configs import is_interpreted

__all__ = ["dot", "precision"]


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return ``acc + a @ b`` in float32."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


def precision(dtype: torch.dtype) -> str:
    """Return how blocks of a dtype are multiplied.

    Parameters
    ----------
    dtype : torch.dtype

    Returns
    -------
    str
        ``"ieee"`` for float32: Triton's default, tf32, is off by 3e-4. ``"widened"`` for bfloat16 in the interpreter,
        which would otherwise multiply the bits as integers. ``"tf32"``, which means nothing there, for the rest.
    """
    if dtype == torch.float32:
        return "ieee"
    return "widened" if dtype == torch.bfloat16 and is_interpreted() else "tf32"
