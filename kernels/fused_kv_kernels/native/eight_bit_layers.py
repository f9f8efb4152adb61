"""The native linear layers and MLPs in eight bits, as functions of tensors. Callers check the shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .elementwise import Norm
from .library import int64_array, loaded_library, num_threads, why_not_native
from .processor import processor_features

__all__ = [
    "ByteOperands",
    "ByteSizes",
    "byte_panels",
    "byte_rows",
    "byte_sizes",
    "native_eight_bit_linear",
    "native_eight_bit_mlp",
]

ByteOperands = tuple[Tensor, Tensor, Tensor, Tensor]
"""Panels, what sums begin with, scales and factors: what :func:`byte_panels` returns, float32 ``[O]`` and ``[I]``."""

_NO_NORM = None, 0.0


class ByteSizes(NamedTuple):
    """What the operators expect of weights.

    Parameters
    ----------
    panel : int
        Outputs of a panel.
    adds_pairs : bool
        Whether products of two neighbouring inputs, the first of them even, are added up in sixteen bits: then two such
        weights of one sign may have a magnitude of 128 together.
    """

    panel: int
    adds_pairs: bool


def byte_sizes(dtype: torch.dtype) -> ByteSizes | None:
    """Return what the operators expect for inputs of a dtype; None where there are none, or AMX is faster."""
    if "amx_int8" in processor_features() or why_not_native(dtype) is not None:
        return None
    found = int64_array(0, 0)
    loaded_library(dtype).fkv_eight_bit_sizes(found)
    return ByteSizes(found[0], bool(found[1])) if found[0] else None


def byte_panels(rows: Tensor, panel: int) -> tuple[Tensor, Tensor]:
    """Pack rounded weights as the operators read them.

    Parameters
    ----------
    rows : Tensor
        int8 ``[O, I]``.
    panel : int
        Outputs of a panel, ``P``.

    Returns
    -------
    panels : Tensor
        int32 ``[ceil(O / P), ceil(I / 4), P]``: four inputs a word, zero for what is not there.
    begins : Tensor
        int32, ``P`` for each panel, which the sums of inputs begin with: they are stored with 128 added.
    """
    outputs, inputs = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -inputs % 4, 0, -outputs % panel))
    words = padded.view(torch.int32)
    panels = words.view(-1, panel, words.shape[1]).transpose(1, 2).contiguous()
    return panels, padded.sum(1, dtype=torch.int32) * -128


def byte_rows(panels: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return the rounded weights ``[O, I]`` that were packed."""
    return panels.transpose(1, 2).contiguous().view(torch.int8).flatten(0, 1)[:outputs, :inputs]


def native_eight_bit_linear(x: Tensor, weights: ByteOperands, norm: Norm | None) -> Tensor:
    """Return ``[..., O]`` of dense inputs ``[..., I]``, in their dtype; of their norm, if there is one."""
    inputs, outputs = _sizes(weights)
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype)
    weight, epsilon = norm or _NO_NORM
    loaded_library(x.dtype).fkv_eight_bit_linear(
        x.data_ptr(),
        _addresses(weights),
        _address(weight),
        out.data_ptr(),
        x.numel() // inputs,
        inputs,
        outputs,
        epsilon,
        num_threads(),
    )
    return out


def native_eight_bit_mlp(
    x: Tensor,
    gate_up: ByteOperands,
    down: ByteOperands,
    attended: tuple[Tensor, ByteOperands] | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """Return ``[..., O]`` of dense inputs ``[..., I]``, see ``fkv_eight_bit_mlp``; the width fills whole panels."""
    inputs, (width, outputs) = x.shape[-1], _sizes(down)
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype)
    rows, output = (None, None) if attended is None else (attended[0].contiguous(), _addresses(attended[1]))
    weight, epsilon = norm or _NO_NORM
    loaded_library(x.dtype).fkv_eight_bit_mlp(
        x.data_ptr(),
        _addresses(gate_up),
        _addresses(down),
        out.data_ptr(),
        int64_array(x.numel() // inputs, inputs, width, outputs, 0 if rows is None else rows.shape[-1]),
        _address(rows),
        output,
        _address(weight),
        epsilon,
        num_threads(),
    )
    return out


def _sizes(weights: ByteOperands) -> tuple[int, int]:
    _, _, scales, factors = weights
    return factors.shape[0], scales.shape[0]


def _addresses(weights: ByteOperands) -> object:
    return int64_array(*(part.data_ptr() for part in weights))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
