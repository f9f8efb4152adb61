"""Linear layers in eight bits, and MLPs and halves of decoder layers that are made of them.

A processor multiplies integers of eight bits faster than float32 or bfloat16. The product is off by a few hundredths,
which suffices where a result only corrects another one. With AVX512-VNNI and VBMI, and without AMX, or with nothing
better than AVX2, native operators round, multiply and scale back a block of rows while it is in a core's cache;
elsewhere torch's oneDNN operators multiply.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import gated_silu, rms_norm
from .native import (
    ByteOperands,
    Norm,
    byte_sizes,
    is_dense_as,
    native_eight_bit_linear,
    native_eight_bit_mlp,
    native_quantize_gated,
    native_scale_rows,
    takes_rows,
)
from .rounded_weights import EightBitWeights, product_of, quantize_rows

__all__ = ["eight_bit_attended_mlp", "eight_bit_gated_mlp", "eight_bit_linears"]


def eight_bit_linears(x: Tensor, weights: EightBitWeights, norm: Norm | None = None) -> list[Tensor]:
    """Return about ``x weight^T + bias`` of every layer, without gradients.

    Parameters
    ----------
    x : Tensor
        float32 or bfloat16 ``[..., I]``.
    weights : EightBitWeights
    norm : tuple of (Tensor, float) or None
        Weight ``[I]`` in the dtype of `x` and epsilon: then it is of ``rms_norm(x)``.

    Returns
    -------
    list of Tensor
        ``[..., O]`` in the dtype of `x`. A row of `x` that is not finite gives outputs that are not.

    Raises
    ------
    ValueError
        If the shapes do not fit together.
    """
    operands, x = weights.operands(), x.contiguous()
    _check(x, weights, norm)
    if operands is not None and _is_native(x, operands, norm):
        return _parts(native_eight_bit_linear(x, operands, norm), weights)
    if norm is not None:
        x = rms_norm(x, *norm)
    rows, scales = quantize_rows(x, weights.factors)
    return _outputs(product_of(rows, weights, x.dtype), scales, weights, x)


def eight_bit_gated_mlp(x: Tensor, gate_up: EightBitWeights, down: EightBitWeights) -> Tensor:
    """Return about ``down(silu(gate(x)) * up(x))``, without gradients.

    Parameters
    ----------
    x : Tensor
        float32 or bfloat16 ``[..., I]``.
    gate_up : EightBitWeights
        Of two layers ``[W, I]``.
    down : EightBitWeights
        Of one layer ``[O, W]``.

    Returns
    -------
    Tensor
        ``[..., O]``, as :func:`eight_bit_linears` returns it.

    Raises
    ------
    ValueError
        If the layers do not fit together.
    """
    x = x.contiguous()
    _check(x, gate_up)
    _check_mlp(gate_up, down)
    mlp = _native_mlp(gate_up, down, x)
    if mlp is not None:
        return _parts(native_eight_bit_mlp(x, *mlp), down)[0]
    rows, scales = quantize_rows(x, gate_up.factors)
    product = product_of(rows, gate_up, x.dtype)
    if _scales_natively(product, scales) and gate_up.biases == (None, None):
        hidden, hidden_scales = native_quantize_gated(product, scales, down.factors.contiguous())
    else:
        hidden, hidden_scales = quantize_rows(gated_silu(*_outputs(product, scales, gate_up, x)), down.factors)
    return _outputs(product_of(hidden, down, x.dtype), hidden_scales, down, x)[0]


def eight_bit_attended_mlp(
    x: Tensor, attended: Tensor, output: EightBitWeights, norm: Norm, gate_up: EightBitWeights, down: EightBitWeights
) -> Tensor:
    """Return about the second half of a decoder layer, without gradients.

    That is ``h + down(silu(gate(n)) * up(n))`` with ``h = x + output(attended)`` and ``n = rms_norm(h)``.

    Parameters
    ----------
    x : Tensor
        float32 or bfloat16 ``[..., H]``.
    attended : Tensor
        What attention gave, ``[..., A]`` in the dtype of `x`.
    output : EightBitWeights
        Of one layer ``[H, A]``.
    norm : tuple of (Tensor, float)
        Weight ``[H]`` in the dtype of `x` and epsilon.
    gate_up, down : EightBitWeights
        As :func:`eight_bit_gated_mlp` takes them.

    Returns
    -------
    Tensor
        ``[..., H]`` in the dtype of `x`.

    Raises
    ------
    ValueError
        If the layers do not fit together.
    """
    x = x.contiguous()
    _check(x, gate_up, norm)
    _check(attended, output)
    _check_mlp(gate_up, down)
    if attended.shape[:-1] != x.shape[:-1] or attended.dtype != x.dtype or {output.sizes, down.sizes} != {x.shape[-1:]}:
        msg = (
            f"x {_described(x)}, attended rows {_described(attended)} and layers of {output.sizes} and {down.sizes} "
            "outputs do not fit together"
        )
        raise ValueError(msg)
    mlp, behind = _native_mlp(gate_up, down, x), output.operands()
    if (
        mlp is not None
        and behind is not None
        and output.biases == (None,)
        and down.biases == (None,)
        and _is_native(x, behind, norm)
    ):
        return native_eight_bit_mlp(x, *mlp, (attended, behind), norm)
    x = x + eight_bit_linears(attended, output)[0]
    return x + eight_bit_gated_mlp(rms_norm(x, *norm), gate_up, down)


def _check_mlp(gate_up: EightBitWeights, down: EightBitWeights) -> None:
    width = down.factors.shape[0]
    if gate_up.sizes != (width, width) or len(down.sizes) != 1:
        msg = f"layers of {gate_up.sizes} outputs, and {len(down.sizes)} of {width} inputs, make no MLP with a gate"
        raise ValueError(msg)


def _check(x: Tensor, weights: EightBitWeights, norm: Norm | None = None) -> None:
    inputs = weights.factors.shape
    if x.shape[-1:] != inputs:
        msg = f"rows of {x.shape[-1]} elements and layers of {inputs[0]} inputs do not fit together"
        raise ValueError(msg)
    if norm is not None and norm[0].shape != inputs:
        msg = f"x {_described(x)} and a norm {_described(norm[0])} do not fit together"
        raise ValueError(msg)


def _is_native(x: Tensor, operands: ByteOperands, norm: Norm | None = None) -> bool:
    """Return whether the native operators take dense rows, the weights' panels and the norm before them."""
    sizes = byte_sizes(x.dtype)
    is_packed = sizes is not None and operands[0].shape[2] == sizes.panel
    return takes_rows(x) and is_packed and (norm is None or is_dense_as(x, norm[0]))


def _described(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype}"


def _native_mlp(gate_up: EightBitWeights, down: EightBitWeights, x: Tensor) -> tuple[ByteOperands, ByteOperands] | None:
    """Return the operands of an MLP that the native operator takes: gate and up begin with a panel of their own."""
    first, last = gate_up.operands(), down.operands()
    if first is None or last is None or gate_up.biases != (None, None):
        return None
    if not _is_native(x, first) or not _is_native(x, last):
        return None
    return None if down.factors.shape[0] % first[0].shape[2] else (first, last)


def _outputs(product: Tensor, scales: Tensor, weights: EightBitWeights, x: Tensor) -> list[Tensor]:
    """Return the outputs of every layer in the shape of `x` from a product whose rows are to be scaled."""
    if _scales_natively(product, scales):
        native_scale_rows(product, scales)
    else:
        # Tensors of one dtype are multiplied twice as fast. Rounding the scales costs less than the eight bits do.
        product.mul_(scales.to(product.dtype)[:, None])
    return _parts(product.view(*x.shape[:-1], sum(weights.sizes)), weights)


def _parts(outputs: Tensor, weights: EightBitWeights) -> list[Tensor]:
    """Return the outputs ``[..., O]`` of every layer, with its bias."""
    parts = torch.split(outputs, list(weights.sizes), dim=-1)
    return [part if bias is None else part + bias for part, bias in zip(parts, weights.biases, strict=True)]


def _scales_natively(product: Tensor, scales: Tensor) -> bool:
    """Return whether the native operators take a product and the scales of its rows."""
    return product.numel() > 0 and product.is_contiguous() and scales.dtype == torch.float32 and takes_rows(product)
