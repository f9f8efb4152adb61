"""The native linear layers and the halves of a decoder layer, as functions of tensors. Callers check the shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import int64_array, kept_array, loaded_library, native_library, num_threads
from .processor import processor_features

__all__ = [
    "is_dense_as",
    "most_linear_rows",
    "native_float_linear",
    "native_gated_mlp",
    "native_heads",
    "native_linears",
    "takes_linears",
]

_Layer = tuple[Tensor, Tensor | None]
_Layers = Sequence[_Layer]

_MOST_ROWS = 96
# AMX multiplies sixteen times as much at a time, and torch uses it: only where memory decides is there less to win.
_MOST_ROWS_BESIDE_TILES = 8


def most_linear_rows(dtype: torch.dtype) -> int:
    """Return up to how many rows the native operator is the faster one; 0 where there is none of this dtype."""
    if dtype != torch.bfloat16 or native_library(dtype) is None:
        return 0
    return _MOST_ROWS_BESIDE_TILES if "amx_bf16" in processor_features() else _MOST_ROWS


def takes_linears(x: Tensor, layers: _Layers, inner: int | None = None) -> bool:
    """Return whether the native operator takes layers: of the dtype of `x`, on the CPU, dense, of even shapes.

    Their inputs have as many elements a row as `x`, or `inner`.
    """
    if not x.is_cpu or (inner or x.shape[-1]) % 32:
        return False
    for weight, bias in layers:
        if weight.shape[0] % 4 or not is_dense_as(x, weight) or (bias is not None and not is_dense_as(x, bias)):
            return False
    return True


def is_dense_as(x: Tensor, *parameters: Tensor) -> bool:
    """Return whether parameters are dense, of the dtype of `x` and where it is."""
    dtype, device = x.dtype, x.device
    return all(one.dtype == dtype and one.device == device and one.is_contiguous() for one in parameters)


def native_linears(x: Tensor, layers: _Layers) -> list[Tensor]:
    """Return :func:`fused_kv_kernels.few_row_linears` of ``[..., I]``."""
    x, inner = x.contiguous(), x.shape[-1]
    outs = [torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype) for weight, _ in layers]
    table = [part for layer, out in zip(layers, outs, strict=True) for part in _row(layer, out.data_ptr())]
    loaded_library(x.dtype).fkv_linears(
        x.data_ptr(), int64_array(*table), len(layers), x.numel() // inner, inner, num_threads()
    )
    return outs


def native_float_linear(x: Tensor, layer: _Layer) -> Tensor:
    """Return :func:`fused_kv_kernels.float_linear` of ``[..., I]``."""
    x, inner = x.contiguous(), x.shape[-1]
    rows = x.numel() // inner
    out = torch.empty(*x.shape[:-1], layer[0].shape[0], dtype=torch.float32)
    for first in range(0, rows, _MOST_ROWS):
        count = min(_MOST_ROWS, rows - first)
        table = int64_array(*_row(layer, out.data_ptr() + 4 * first * layer[0].shape[0]))
        at = x.data_ptr() + x.element_size() * first * inner
        loaded_library(x.dtype).fkv_float_linear(at, table, count, inner, num_threads())
    return out


def native_heads(
    x: Tensor, weight: Tensor, epsilon: float, layers: _Layers, cos: Tensor, sin: Tensor, head_dim: int,
    head_norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return :func:`fused_kv_kernels.few_row_heads` of float32 ``[B, R, H]``."""
    x, dtype = x.contiguous(), weight.dtype
    batch, rows, dim = x.shape
    counts = [one.shape[0] for one, _ in layers]
    outs = [torch.empty(batch, rows, count // head_dim, head_dim, dtype=dtype) for count in counts]
    table = [part for layer, out in zip(layers, outs, strict=True) for part in _row(layer, out.data_ptr())]
    normal = torch.empty_like(x, dtype=dtype)
    norms = (0, 0) if head_norms is None else (head_norms[0].data_ptr(), head_norms[1].data_ptr())
    loaded_library(dtype).fkv_heads(
        x.data_ptr(),
        weight.data_ptr(),
        int64_array(*table),
        kept_array(norms),
        normal.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        kept_array((batch, rows, dim, head_dim, cos.shape[2] // 2, 0 if cos.shape[0] == 1 else cos.stride(0))),
        epsilon,
        0.0 if head_norms is None else head_norms[2],
        num_threads(),
    )
    q, k, v = (out.transpose(1, 2) for out in outs)
    return q, k, v


def native_gated_mlp(
    x: Tensor, weight: Tensor, epsilon: float, layers: _Layers, attended: tuple[Tensor, _Layer] | None
) -> Tensor:
    """Return :func:`fused_kv_kernels.few_row_mlp` of float32 ``[..., H]``; the layers are gate, up and down."""
    x, dim, dtype = x.contiguous(), x.shape[-1], weight.dtype
    rows, width = x.numel() // dim, layers[0][0].shape[0]
    out = torch.empty_like(x)
    # The normal rows, what is added to x, gate and up.
    scratch = torch.empty(2 * rows * (dim + width), dtype=dtype)
    normal, added, *inner = (scratch.data_ptr() + 2 * rows * before for before in (0, dim, 2 * dim, 2 * dim + width))
    table = [part for layer, at in zip(layers, (*inner, added), strict=True) for part in _row(layer, at)]
    library, ends = loaded_library(dtype), (dim, epsilon, num_threads())
    if attended is None:
        pointers = (x.data_ptr(), weight.data_ptr(), int64_array(*table), normal, out.data_ptr())
        library.fkv_gated_mlp(*pointers, rows, *ends)
    else:
        before, whole = attended[0].contiguous(), int64_array(*_row(attended[1], added), *table)
        behind = (before.data_ptr(), weight.data_ptr(), whole, normal, out.data_ptr())
        library.fkv_attended_mlp(x.data_ptr(), *behind, rows, before.shape[-1], *ends)
    return out


def _row(layer: _Layer, out: int) -> tuple[int, int, int, int]:
    """Return a layer as native code takes it; `out` is the address of its output."""
    weight, bias = layer
    return weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out, weight.shape[0]
