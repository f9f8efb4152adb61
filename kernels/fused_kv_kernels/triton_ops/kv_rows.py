"""Rows of keys and values in Triton: where rotary pairs lie in a row, how they are turned, and adding to a row."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_to", "pair_columns", "turn", "turn_back"]


@triton.jit
def pair_columns(pairs, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the columns of both dimensions of each pair."""
    x_at = pairs * 2 if INTERLEAVED else pairs
    y_at = x_at + 1 if INTERLEAVED else x_at + HALF
    return x_at, y_at


@triton.jit
def turn(x, y, cos, sin):
    """Rotate pairs by their angles."""
    return x * cos - y * sin, y * cos + x * sin


@triton.jit
def turn_back(x, y, cos, sin):
    """Rotate pairs back by their angles."""
    return x * cos + y * sin, y * cos - x * sin


@triton.jit
def add_to(at, change, mask):
    """Add a float32 change to what is stored, in the dtype in which it is."""
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (old + change).to(at.dtype.element_ty), mask=mask)
