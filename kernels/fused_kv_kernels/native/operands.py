"""Which tensors the native CPU operators take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import native_library

__all__ = ["supports", "supports_int8_rows", "supports_rows"]

_LARGEST_DIM = 1024


def supports(*tensors: Tensor) -> bool:
    """Return whether the native operators take these tensors: of one dtype that has them, on the CPU, columns dense.

    The number of columns must be even, as products of bfloat16 take them in pairs.
    """
    dtype = tensors[0].dtype
    for t in tensors:
        columns = t.shape[-1]
        if t.dtype != dtype or not t.is_cpu or t.stride(-1) != 1 or columns % 2 or columns > _LARGEST_DIM:
            return False
    return native_library(dtype) is not None


def supports_rows(*tensors: Tensor) -> bool:
    """Return whether the native operators take ``[H, N, D]`` whose rows also lie one after another."""
    return all(t.stride(1) == t.shape[2] for t in tensors) and supports(*tensors)


def supports_int8_rows(chunks: Sequence[tuple[Tensor, Tensor]], scales: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether the native operators take chunks ``[..., Hkv, T, D]`` in eight bits with their float16 scales."""
    rows = [part for pair in chunks for part in pair]
    factors = [part for pair in scales for part in pair]
    dense_scales = all(keys.stride(-1) == 1 and values.stride(-2) == 1 for keys, values in scales)
    return (
        len(chunks) == len(scales)
        and all(t.dtype == torch.int8 and t.device.type == "cpu" for t in rows)
        and all(t.dtype == torch.float16 and t.device.type == "cpu" for t in factors)
        and all(t.stride(-1) == 1 and t.stride(-2) == t.shape[-1] <= _LARGEST_DIM for t in rows)
        and dense_scales
    )
