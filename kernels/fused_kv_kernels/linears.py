"""Linear layers for few rows: a question's, or the one that is being generated.

Beside many rows, a library's way of preparing the weights costs nothing; beside few it costs as much as the products.
On a CPU in bfloat16 a native operator reads the weights where they are, once. At the shapes of SmolLM2-135M, on two
cores of an AMD EPYC (Zen 5), it measured 1.7 times as fast as torch with 1 to 16 rows, 1.5 times with 33, 1.2 times
with 64 and alike from 130 on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .elementwise import gated_silu, rms_norm
from .native import most_linear_rows, native_gated_mlp, native_linears, takes_linears

__all__ = ["few_row_linears", "few_row_mlp"]

_Layer = tuple[Tensor, Tensor | None]


def few_row_linears(x: Tensor, layers: Sequence[_Layer]) -> list[Tensor]:
    """Return ``x weight^T + bias`` of one or several layers that read the same input, without gradients.

    Parameters
    ----------
    x : Tensor
        ``[..., I]``.
    layers : sequence of (Tensor, Tensor or None)
        Weights ``[O, I]``, and a bias ``[O]`` or none.

    Returns
    -------
    list of Tensor
        ``[..., O]`` in the dtype of `x`: sums in float32, rounded once.

    Raises
    ------
    ValueError
        If the shapes do not fit together.
    """
    _check(x.shape[-1], layers)
    if 0 < x.numel() <= most_linear_rows(x.dtype) * x.shape[-1] and takes_linears(x, layers):
        return native_linears(x, layers)
    return [torch.nn.functional.linear(x, weight, bias) for weight, bias in layers]


def few_row_mlp(x: Tensor, weight: Tensor, epsilon: float, gate: _Layer, up: _Layer, down: _Layer) -> Tensor:
    """Return the second half of a decoder layer, ``x + down(silu(gate(n)) * up(n))`` with ``n = rms_norm(x)``.

    Parameters
    ----------
    x : Tensor
        ``[..., H]``.
    weight : Tensor
        The norm's, ``[H]``.
    epsilon : float
        The norm's.
    gate, up, down : tuple of (Tensor, Tensor or None)
        Weights ``[W, H]``, ``[W, H]`` and ``[H, W]``, each with a bias or none.

    Returns
    -------
    Tensor
        ``[..., H]`` in the dtype of `x`, bit by bit what the operators by themselves give, but for
        subnormal sums, which become zero.

    Raises
    ------
    ValueError
        If the shapes do not fit together.
    """
    width = gate[0].shape[0]
    _check(x.shape[-1], (gate, up))
    _check(width, (down,))
    if up[0].shape != gate[0].shape or down[0].shape[0] != x.shape[-1] or weight.shape != x.shape[-1:]:
        msg = (
            f"x {list(x.shape)}, a norm {list(weight.shape)} and an MLP of {list(gate[0].shape)}, {list(up[0].shape)} "
            f"and {list(down[0].shape)} do not fit together"
        )
        raise ValueError(msg)
    if (
        0 < x.numel() <= most_linear_rows(x.dtype) * x.shape[-1]
        and takes_linears(x, (gate, up))
        and takes_linears(x.new_empty(0, width), (down,))
        and weight.dtype == x.dtype
        and weight.is_contiguous()
    ):
        return native_gated_mlp(x, weight, epsilon, (gate, up, down))
    gated = gated_silu(*few_row_linears(rms_norm(x, weight, epsilon), (gate, up)))
    return x + few_row_linears(gated, (down,))[0]


def _check(inner: int, layers: Sequence[_Layer]) -> None:
    for weight, bias in layers:
        if weight.dim() != 2 or weight.shape[1] != inner or (bias is not None and bias.shape != weight.shape[:1]):
            msg = (
                f"rows of {inner} elements, a weight {list(weight.shape)} and its bias "
                f"{None if bias is None else list(bias.shape)} do not fit together"
            )
            raise ValueError(msg)
