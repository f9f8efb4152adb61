"""The element-wise steps between a decoder's matrix products: RMS norm, rotary positions, and the gate of its MLP.

Torch makes several passes over the memory for each of them. The native operators make one, which matters where few rows
leave little else to compute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .native import (
    native_gated_silu,
    native_residual_norm,
    native_rms_norm,
    native_rotate_rows,
    supports,
    takes_rows,
)

__all__ = ["check_residual", "gated_silu", "residual_norm", "rms_norm", "rotate_rows_"]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return ``weight * x / sqrt(mean(x^2) + epsilon)``, the mean over the last dimension.

    Computed in float32; the quotient is rounded to the dtype of `x` before it is multiplied, as transformers does.

    Parameters
    ----------
    x : Tensor
        ``[..., H]``.
    weight : Tensor
        ``[H]``.
    epsilon : float

    Returns
    -------
    Tensor
        Like `x`.
    """
    if x.numel() and x.shape[-1] == weight.shape[0]:
        # However the rows lie: torch rounds some sums to a neighbouring number.
        dense = x.contiguous()
        if takes_rows(dense, weight):
            return native_rms_norm(dense, weight, epsilon)
    return weight * _quotient(x, epsilon).to(x.dtype)


def residual_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the norm of the residual stream, see :func:`rms_norm`, rounded once.

    Parameters
    ----------
    x : Tensor
        float32 ``[..., H]``.
    weight : Tensor
        ``[H]``.
    epsilon : float

    Returns
    -------
    Tensor
        ``[..., H]`` in the dtype of `weight`.

    Raises
    ------
    ValueError
        If `x` is not float32.
    """
    check_residual(x)
    if x.dtype == weight.dtype:
        return rms_norm(x, weight, epsilon)
    is_native = weight.dtype == torch.bfloat16 and x.is_cpu and takes_rows(weight)
    if is_native and x.numel() and x.shape[-1] == weight.shape[0]:
        return native_residual_norm(x, weight, epsilon)
    return (weight.float() * _quotient(x, epsilon)).to(weight.dtype)


def check_residual(x: Tensor) -> None:
    """Raise ValueError unless `x` is float32."""
    if x.dtype != torch.float32:
        msg = f"x {list(x.shape)} is {x.dtype}: the residual stream is float32, whatever the layers are"
        raise ValueError(msg)


def _quotient(x: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, the first factor rounded to its dtype.

    Parameters
    ----------
    gate, up : Tensor
        ``[..., W]`` of one shape.

    Returns
    -------
    Tensor
        Like `gate`, dense.
    """
    if gate.numel() and gate.dim() > 1 and gate.shape == up.shape and takes_rows(gate, up):
        return native_gated_silu(gate, up)
    return torch.nn.functional.silu(gate) * up


def rotate_rows_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys to their positions, in place: ``x cos + rotate_half(x) sin``, products rounded.

    Parameters
    ----------
    x : Tensor
        ``[B, H, R, D]``, any strides but the last.
    cos, sin : Tensor
        ``[1 or B, R, rotary]``, half-split layout, in the dtype of `x`; columns from `rotary` on stay as they are.

    Returns
    -------
    Tensor
        `x`.
    """
    if x.numel() == 0:
        return x
    rotary = cos.shape[-1]
    fits = cos.shape == sin.shape and cos.shape[1:2] == x.shape[2:3] and cos.shape[0] in (1, x.shape[0])
    native = cos.dtype == x.dtype and supports(x) and takes_rows(cos, sin)
    if fits and rotary % 2 == 0 and rotary <= x.shape[3] and native:
        native_rotate_rows(x, cos.contiguous(), sin.contiguous())
        return x
    turned, half = x[..., :rotary], rotary // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    x[..., :rotary] = turned * cos[:, None] + swapped * sin[:, None]
    return x
