"""Matrix products of blocks, with the full precision of the operands' dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .configs import is_interpreted

if TYPE_CHECKING:
    from fused_kv_kernels.scoring import Scoring

__all__ = ["dot", "key_scores", "precision", "sink_weight", "weight_factors"]

_LOG2_E = 1.4426950408889634


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """Return ``acc + a @ b`` in float32."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _tanh(x):
    """Return the hyperbolic tangent; its series where the difference below would cancel."""
    square = x * x
    series = x * (1.0 + square * (-0.33333333 + square * (0.13333333 - square * 0.053968254)))
    return tl.where(tl.abs(x) < 0.2, series, 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))


@triton.jit
def _scaled_scores(products, scale, cap, CAPPED: tl.constexpr):
    """Return products times a scale or, capped, ``cap * tanh(products * scale)``."""
    if CAPPED:
        return cap * _tanh(products * scale)
    return products * scale


@triton.jit
def key_scores(queries, keys, scale, cap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """Return the scores of a block of query rows and a block of keys."""
    nothing = tl.zeros((queries.shape[0], keys.shape[0]), dtype=tl.float32)
    return _scaled_scores(dot(queries, tl.trans(keys), nothing, PRECISION), scale, cap, CAPPED)


@triton.jit
def sink_weight(sink, level):
    """Return what a sink adds to a sum of weights that are relative to ``2^level``, cut before it is infinite."""
    base = tl.where(level == float("-inf"), 0.0, level)
    return tl.exp2(tl.minimum(sink * 1.4426950408889634 - base, 126.0))


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


def weight_factors(scoring: Scoring) -> tuple[float, float]:
    """Return what products are multiplied by, and the cap, so that ``2^score`` is a weight."""
    if scoring.softcap is None:
        return scoring.scale * _LOG2_E, 0.0
    return scoring.scale / scoring.softcap, scoring.softcap * _LOG2_E
