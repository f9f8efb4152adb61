"""Linear layers in eight bits: activations are scaled by row, weights by output, and integers are summed.

A processor multiplies integers of eight bits faster than float32 or bfloat16. The product is off by a few hundredths,
which suffices where a result only corrects another one. The precision that the inputs' largest channels would cost is
moved into the weights (SmoothQuant, Xiao et al. 2023, equation 4 with alpha = 0.5). Channels that a sample hardly uses
count as average ones: a text that does use them must not lose all others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import UnsupportedOperandsError
from .elementwise import gated_silu
from .native import native_quantize_gated, native_quantize_rows, native_scale_rows, takes_rows

__all__ = [
    "EightBitWeights",
    "eight_bit_gated_mlp",
    "eight_bit_linears",
    "eight_bit_weights",
    "has_eight_bit_linears",
    "quantize_rows",
]

_LARGEST_INPUT, _ZERO_INPUT = 127, 128
# Without VNNI, a processor adds two products up in sixteen bits, and two of 255 times 63 fit.
_LARGEST_WEIGHTS = (127, 63)
_SMALLEST = 1e-5


@dataclass(frozen=True, slots=True)
class EightBitWeights:
    """Weights of layers that read the same input, one below the other.

    Parameters
    ----------
    packed : Tensor
        Integers ``[O, I]``, packed for oneDNN.
    scales : Tensor
        float32 ``[O]``, by which they are multiplied.
    factors : Tensor
        float32 ``[I]``, powers of two, by which inputs are multiplied before they are rounded.
    biases : tuple of Tensor or None
        Of each layer.
    sizes : tuple of int
        Outputs of each layer.
    """

    packed: Tensor
    scales: Tensor
    factors: Tensor
    biases: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]


def eight_bit_weights(layers: Sequence[tuple[Tensor, Tensor | None]], largest: Tensor) -> EightBitWeights:
    """Round the weights of layers that read the same input.

    Parameters
    ----------
    layers : sequence of (Tensor, Tensor or None)
        Weights ``[O, I]``, and a bias ``[O]`` or none.
    largest : Tensor
        ``[I]``: the largest magnitudes that inputs usually have.

    Raises
    ------
    UnsupportedOperandsError
        If there are no eight-bit products here, see :func:`has_eight_bit_linears`.
    """
    largest_weight = _largest_weight()
    if not largest_weight:
        msg = "eight-bit weights need torch's oneDNN operators for integers; compute these layers in their dtype"
        raise UnsupportedOperandsError(msg)
    # Under an autocast to float16, torch.cat refuses bfloat16.
    with torch.autocast("cpu", enabled=False):
        weight = torch.cat([one.detach() for one, _ in layers])
    largest = largest.float()
    usual = largest.clamp_min(float(largest.mean())).clamp_min(_SMALLEST)
    ratios = weight.abs().amax(0).float().clamp_min(_SMALLEST) / usual
    # Multiplying by powers of two is exact: where `largest` differs in the last bits, what is rounded does not.
    factors = torch.exp2((0.5 * torch.log2(ratios)).round())
    rows, scales = quantize_rows(weight, 1.0 / factors, largest_weight)
    # With its first bit turned, a byte means as much with a sign as it meant without one above 128.
    packed = torch.ops.onednn.qlinear_prepack(rows.bitwise_xor_(_ZERO_INPUT).view(torch.int8), None)
    return EightBitWeights(
        packed, scales, factors, tuple(bias for _, bias in layers), tuple(one.shape[0] for one, _ in layers)
    )


def eight_bit_linears(x: Tensor, weights: EightBitWeights) -> list[Tensor]:
    """Return about ``x weight^T + bias`` of every layer, without gradients.

    Parameters
    ----------
    x : Tensor
        float32 or bfloat16 ``[..., I]``.
    weights : EightBitWeights

    Returns
    -------
    list of Tensor
        ``[..., O]`` in the dtype of `x`. A row of `x` that is not finite gives outputs that are not.
    """
    rows, scales = quantize_rows(x, weights.factors)
    return _outputs(_product(rows, weights.packed, weights.scales, x.dtype), scales, weights, x)


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
    width = down.factors.shape[0]
    if gate_up.sizes != (width, width) or len(down.sizes) != 1:
        msg = f"layers of {gate_up.sizes} outputs, and {len(down.sizes)} of {width} inputs, make no MLP with a gate"
        raise ValueError(msg)
    rows, scales = quantize_rows(x, gate_up.factors)
    product = _product(rows, gate_up.packed, gate_up.scales, x.dtype)
    if _scales_natively(product, scales) and gate_up.biases == (None, None):
        hidden, hidden_scales = native_quantize_gated(product, scales, down.factors.contiguous(), _LARGEST_INPUT)
    else:
        hidden, hidden_scales = quantize_rows(gated_silu(*_outputs(product, scales, gate_up, x)), down.factors)
    return _outputs(_product(hidden, down.packed, down.scales, x.dtype), hidden_scales, down, x)[0]


def _outputs(product: Tensor, scales: Tensor, weights: EightBitWeights, x: Tensor) -> list[Tensor]:
    """Return the outputs of every layer in the shape of `x` from a product whose rows are to be scaled."""
    if _scales_natively(product, scales):
        native_scale_rows(product, scales)
    else:
        # Tensors of one dtype are multiplied twice as fast. Rounding the scales costs less than the eight bits do.
        product.mul_(scales.to(product.dtype)[:, None])
    sizes = list(weights.sizes)
    parts = torch.split(product.view(*x.shape[:-1], sum(sizes)), sizes, dim=-1)
    return [part if bias is None else part + bias for part, bias in zip(parts, weights.biases, strict=True)]


def _scales_natively(product: Tensor, scales: Tensor) -> bool:
    """Return whether the native operators take a product and the scales of its rows."""
    return product.numel() > 0 and product.is_contiguous() and scales.dtype == torch.float32 and takes_rows(product)


def quantize_rows(x: Tensor, factors: Tensor, most: int = _LARGEST_INPUT) -> tuple[Tensor, Tensor]:
    """Return ``x * factors`` in eight bits, row by row.

    Parameters
    ----------
    x : Tensor
        float32 or bfloat16 ``[..., I]``.
    factors : Tensor
        float32 ``[I]``.
    most : int
        What the largest magnitude of a row becomes, up to 127.

    Returns
    -------
    rows : Tensor
        uint8 ``[R, I]``, 128 for zero.
    scales : Tensor
        float32 ``[R]``, by which ``rows - 128`` is multiplied.

    Raises
    ------
    ValueError
        If there is not one factor for each column, or `most` is too large.
    """
    if not 0 < most <= _LARGEST_INPUT:
        msg = f"most={most} does not fit in eight bits: take 1 to {_LARGEST_INPUT}"
        raise ValueError(msg)
    if factors.shape != x.shape[-1:]:
        msg = f"rows of {x.shape[-1]} elements and factors {list(factors.shape)} do not fit together"
        raise ValueError(msg)
    dense, factors = x.flatten(0, -2).contiguous(), factors.contiguous()
    if dense.numel() and takes_rows(dense) and takes_rows(factors):
        return native_quantize_rows(dense, factors, most)
    scaled = dense.float() * factors
    scales = scaled.abs().amax(1).clamp_min(1e-30) / most
    whole = (scaled / scales[:, None]).nan_to_num(0.0).round() + _ZERO_INPUT
    return whole.to(torch.uint8), scales


def _product(rows: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(scales.shape[0], dtype=torch.int32)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, _ZERO_INPUT, packed, scales, zeros, None, 1.0, 0, dtype, "none", [], ""
    )
    return product


@functools.cache
def has_eight_bit_linears(dtype: torch.dtype = torch.float32) -> bool:
    """Return whether torch has these operators (internal to its compiler) and they sum exactly on this machine.

    Parameters
    ----------
    dtype : torch.dtype
        Of inputs and outputs.
    """
    return _largest_weight() > 0 and _sums_exactly(_largest_weight(), dtype)


@functools.cache
def _largest_weight() -> int:
    """Return the largest magnitude of a rounded weight with which sums are exact here: 127 or 63, or 0 if none is."""
    return next((largest for largest in _LARGEST_WEIGHTS if _sums_exactly(largest, torch.float32)), 0)


def _sums_exactly(largest: int, dtype: torch.dtype) -> bool:
    """Return whether products of such weights are right, but for rounding the result to a dtype."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 256, (7, 96), generator=generator, dtype=torch.uint8)
    rows[0] = 255
    whole = torch.randint(-largest, largest + 1, (33, 96), generator=generator, dtype=torch.int8)
    whole[0], whole[1] = largest, -largest
    scales = torch.rand(33, generator=generator) + 0.5
    try:
        with torch.inference_mode():
            got = _product(rows, torch.ops.onednn.qlinear_prepack(whole, None), scales, dtype)
    except (AttributeError, RuntimeError, TypeError):
        return False
    want = ((rows.long() - _ZERO_INPUT) @ whole.long().T) * scales
    return torch.allclose(got.float(), want, rtol=max(1e-5, torch.finfo(dtype).eps))
