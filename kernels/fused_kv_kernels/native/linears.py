"""The native linear layers as functions of tensors. Their callers have checked shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .build import processor_features
from .library import int64_array, loaded_library, native_library, num_threads

__all__ = ["most_linear_rows", "native_gated_mlp", "native_linears", "takes_linears"]

_Layers = Sequence[tuple[Tensor, Tensor | None]]

_MOST_ROWS = 96
# AMX multiplies sixteen times as much at a time, and torch uses it: only where memory decides is there less to win.
_MOST_ROWS_BESIDE_TILES = 8


def most_linear_rows(dtype: torch.dtype) -> int:
    """Return up to how many rows the native operator is the faster one; 0 where there is none of this dtype."""
    if dtype != torch.bfloat16 or native_library(dtype) is None:
        return 0
    return _MOST_ROWS_BESIDE_TILES if "amx_bf16" in processor_features() else _MOST_ROWS


def takes_linears(x: Tensor, layers: _Layers) -> bool:
    """Return whether the native operator takes an input and layers: one dtype, on the CPU, dense, of even shapes."""
    if x.device.type != "cpu" or x.shape[-1] % 32:
        return False
    return all(_fits(weight, x) and weight.shape[0] % 4 == 0 and (bias is None or _fits(bias, x))
               for weight, bias in layers)  # fmt: skip


def _fits(parameter: Tensor, x: Tensor) -> bool:
    return parameter.dtype == x.dtype and parameter.device == x.device and parameter.is_contiguous()


def native_linears(x: Tensor, layers: _Layers) -> list[Tensor]:
    """Return :func:`fused_kv_kernels.few_row_linears` of ``[..., I]``."""
    x, inner = x.contiguous(), x.shape[-1]
    outs, table = _laid_out(x, layers)
    loaded_library(x.dtype).fkv_linears(
        x.data_ptr(), int64_array(*table), len(layers), x.numel() // inner, inner, num_threads()
    )
    return outs


def native_gated_mlp(x: Tensor, weight: Tensor, epsilon: float, layers: _Layers) -> Tensor:
    """Return :func:`fused_kv_kernels.few_row_mlp` of ``[..., H]``; the layers are gate, up and down."""
    x, dim = x.contiguous(), x.shape[-1]
    outs, table = _laid_out(x, layers)
    normal = torch.empty_like(x)
    loaded_library(x.dtype).fkv_gated_mlp(
        x.data_ptr(),
        weight.data_ptr(),
        int64_array(*table),
        normal.data_ptr(),
        x.numel() // dim,
        dim,
        epsilon,
        num_threads(),
    )
    return outs[-1]


def _laid_out(x: Tensor, layers: _Layers) -> tuple[list[Tensor], list[int]]:
    """Return memory for the layers' outputs, and the layers as native code takes them."""
    outs = [torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype) for weight, _ in layers]
    table = [
        number
        for (weight, bias), out in zip(layers, outs, strict=True)
        for number in (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), weight.shape[0])
    ]
    return outs, table
