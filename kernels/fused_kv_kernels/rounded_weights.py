"""Weights and rows of activations in eight bits: activations are scaled by row, weights by output, and integers summed.

The precision that the inputs' largest channels would cost is moved into the weights (SmoothQuant, Xiao et al. 2023,
equation 4 with alpha = 0.5). Channels that a sample hardly uses count as average ones: a text that does use them must
not lose all others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import UnsupportedOperandsError
from .native import ByteOperands, ByteSizes, byte_panels, byte_rows, byte_sizes, native_quantize_rows, takes_rows

__all__ = [
    "EightBitWeights",
    "eight_bit_weights",
    "has_eight_bit_linears",
    "product_of",
    "quantize_rows",
]

_LARGEST = 127
_ZERO_INPUT = 128
# Without VNNI, a processor adds two products up in sixteen bits, and two of 255 times 63 always fit.
_LARGEST_WEIGHTS = (_LARGEST, 63)
_SMALLEST = 1e-5


@dataclass(frozen=True, slots=True)
class EightBitWeights:
    """Weights of layers that read the same input, one below the other.

    Parameters
    ----------
    packed : Tensor
        Integers ``[O, I]``, packed for the native operators or for oneDNN.
    begins : Tensor or None
        int32, what the native operators' sums begin with, see :func:`.byte_panels`; None for oneDNN.
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
    begins: Tensor | None
    scales: Tensor
    factors: Tensor
    biases: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]

    def operands(self) -> ByteOperands | None:
        """Return what the native operators take, or None if the weights are packed for oneDNN."""
        return None if self.begins is None else (self.packed, self.begins, self.scales, self.factors)


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
    if not _largest_weight():
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
    sizes = _native_sizes(weight.dtype)
    rows, scales = quantize_rows(weight, 1.0 / factors, _ranges(weight, factors, sizes))
    # With its first bit turned, a byte means as much with a sign as it meant without one above 128.
    signed = rows.bitwise_xor_(_ZERO_INPUT).view(torch.int8)
    if sizes is None:
        packed, begins = torch.ops.onednn.qlinear_prepack(signed, None), None
    else:
        packed, begins = byte_panels(signed, sizes.panel)
    return EightBitWeights(
        packed, begins, scales, factors, tuple(bias for _, bias in layers), tuple(one.shape[0] for one, _ in layers)
    )


def _native_sizes(dtype: torch.dtype) -> ByteSizes | None:
    """Return what the native operators expect, or None where oneDNN multiplies."""
    sizes = byte_sizes(dtype)
    # There are processors whose instructions for whole bytes only oneDNN uses.
    return None if sizes is not None and sizes.adds_pairs and _largest_weight() == _LARGEST else sizes


def _ranges(weight: Tensor, factors: Tensor, sizes: ByteSizes | None) -> Tensor | None:
    """Return ``[O]``, what of each output becomes 127 so that sums are exact; None for its largest weight."""
    if _largest_weight() == _LARGEST if sizes is None else not sizes.adds_pairs:
        return None
    scaled = weight.float() / factors
    largest = scaled.abs().amax(1)
    if sizes is None:
        return largest * (_LARGEST / _largest_weight())
    # Rounding adds at most one to two weights of a pair together, and 255 times 128 fits in sixteen bits.
    even = torch.nn.functional.pad(scaled, (0, scaled.shape[1] % 2))
    return torch.maximum(largest, (even[:, ::2] + even[:, 1::2]).abs().amax(1))


def quantize_rows(x: Tensor, factors: Tensor, ranges: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``x * factors`` in eight bits, row by row.

    Parameters
    ----------
    x : Tensor
        float32 or bfloat16 ``[..., I]``.
    factors : Tensor
        float32 ``[I]``.
    ranges : Tensor or None
        float32 ``[R]``: which magnitude of a row becomes 127, no smaller than its largest one, which it is without.

    Returns
    -------
    rows : Tensor
        uint8 ``[R, I]``, 128 for zero.
    scales : Tensor
        float32 ``[R]``, by which ``rows - 128`` is multiplied.

    Raises
    ------
    ValueError
        If there is not one factor for each column, or not one range for each row.
    """
    if factors.shape != x.shape[-1:]:
        msg = f"rows of {x.shape[-1]} elements and factors {list(factors.shape)} do not fit together"
        raise ValueError(msg)
    dense, factors = x.flatten(0, -2).contiguous(), factors.contiguous()
    if ranges is not None and ranges.shape != dense.shape[:1]:
        msg = f"{dense.shape[0]} rows and ranges {list(ranges.shape)} do not fit together"
        raise ValueError(msg)
    if dense.numel() and takes_rows(dense) and takes_rows(factors) and (ranges is None or takes_rows(ranges)):
        return native_quantize_rows(dense, factors, ranges)
    scaled = dense.float() * factors
    scales = (scaled.abs().amax(1) if ranges is None else ranges).clamp_min(1e-30) / _LARGEST
    whole = (scaled / scales[:, None]).nan_to_num(0.0).round() + _ZERO_INPUT
    return whole.to(torch.uint8), scales


def product_of(rows: Tensor, weights: EightBitWeights, dtype: torch.dtype) -> Tensor:
    """Return rounded rows by rounded weights, ``[R, O]`` in a dtype, without the rows' scales and without biases.

    Parameters
    ----------
    rows : Tensor
        uint8 ``[R, I]``, as :func:`quantize_rows` returns them.
    weights : EightBitWeights
    dtype : torch.dtype
    """
    if weights.begins is None:
        return _product(rows, weights.packed, weights.scales, dtype)
    # The native operators have been turned off since the weights were packed, or have none for this dtype.
    signed = byte_rows(weights.packed, sum(weights.sizes), weights.factors.shape[0])
    return ((rows.float() - _ZERO_INPUT) @ signed.float().T).mul_(weights.scales).to(dtype)


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
