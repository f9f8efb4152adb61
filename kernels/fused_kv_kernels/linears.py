"""Linear layers for few rows: a question's, or the one that is being generated.

A matrix library brings the weights into a layout of its own first. With few rows that takes as long as the products, so
on a CPU in bfloat16 a native operator reads the weights in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .native import most_linear_rows, native_float_linear, native_linears, takes_linears

__all__ = ["Layer", "check_linears", "few_row_linears", "float_linear"]

Layer = tuple[Tensor, Tensor | None]
"""A weight ``[O, I]``, and a bias ``[O]`` or none."""


def few_row_linears(x: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
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
    check_linears(x.shape[-1], layers)
    if 0 < x.numel() <= most_linear_rows(x.dtype) * x.shape[-1] and takes_linears(x, layers):
        return native_linears(x, layers)
    return [torch.nn.functional.linear(x, weight, bias) for weight, bias in layers]


def float_linear(x: Tensor, layer: Layer) -> Tensor:
    """Return ``x weight^T + bias`` in float32, without gradients: an output head's logits, which nothing multiplies.

    In bfloat16, neighbouring logits of a likely token are a sixteenth or an eighth apart, and often equal.

    Parameters
    ----------
    x : Tensor
        ``[..., I]``.
    layer : tuple of (Tensor, Tensor or None)
        Weight ``[O, I]`` in the dtype of `x`, and a bias ``[O]`` or none.

    Returns
    -------
    Tensor
        float32 ``[..., O]``: the sums. They are rounded to the dtype of `x` all the same, as torch does, without
        native operators of that dtype, and where `I` is no multiple of 32 or `O` none of 4.

    Raises
    ------
    ValueError
        If the shapes do not fit together.
    """
    check_linears(x.shape[-1], (layer,))
    if x.numel() and most_linear_rows(x.dtype) and takes_linears(x, (layer,)):
        return native_float_linear(x, layer)
    return torch.nn.functional.linear(x, *layer).float()


def check_linears(inner: int, layers: Sequence[Layer]) -> None:
    """Raise ValueError unless layers read rows of `inner` elements."""
    for weight, bias in layers:
        if weight.dim() != 2 or weight.shape[1] != inner or (bias is not None and bias.shape != weight.shape[:1]):
            msg = (
                f"rows of {inner} elements, a weight {list(weight.shape)} and its bias "
                f"{None if bias is None else list(bias.shape)} do not fit together"
            )
            raise ValueError(msg)
