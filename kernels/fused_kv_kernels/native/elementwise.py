"""The native element-wise operators as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .library import int64_array, loaded_library, native_library, num_threads

__all__ = [
    "Norm",
    "native_compress_rows",
    "native_gated_silu",
    "native_quantize_gated",
    "native_quantize_rows",
    "native_residual_norm",
    "native_rms_norm",
    "native_rotate_rows",
    "native_scale_rows",
    "takes_rows",
]

Norm = tuple[Tensor, float]
"""Weight ``[H]``, in the dtype of what comes out, and epsilon."""


def takes_rows(*tensors: Tensor) -> bool:
    """Return whether the element-wise operators take these: of one dtype, on the CPU, rows dense and evenly spaced."""
    dtype = tensors[0].dtype
    for t in tensors:
        if t.dtype != dtype or not t.is_cpu or t.stride(-1) != 1 or not _evenly_spaced(t):
            return False
    return native_library(dtype) is not None


def _evenly_spaced(tensor: Tensor) -> bool:
    """Return whether all dimensions but the last could be one."""
    if tensor.is_contiguous():
        return True
    shape, stride = tensor.shape, tensor.stride()
    return all(shape[i] == 1 or stride[i] == stride[i + 1] * shape[i + 1] for i in range(tensor.dim() - 2))


def native_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return :func:`fused_kv_kernels.rms_norm` of ``[..., H]``."""
    return _normal(loaded_library(x.dtype).fkv_rms_norm, x.contiguous(), weight, epsilon)


def native_residual_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return :func:`fused_kv_kernels.residual_norm` of float32 ``[..., H]``, by a bfloat16 weight."""
    return _normal(loaded_library(weight.dtype).fkv_residual_norm, x.contiguous(), weight, epsilon)


def _normal(norm: Callable[..., None], x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    out, dim = torch.empty(x.shape, dtype=weight.dtype), x.shape[-1]
    norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, epsilon, num_threads())
    return out


def native_quantize_rows(x: Tensor, factors: Tensor, ranges: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return :func:`fused_kv_kernels.quantize_rows` of a dense matrix ``[R, I]``."""
    rows, dim = x.shape
    out, scales = torch.empty(rows, dim, dtype=torch.uint8), torch.empty(rows, dtype=torch.float32)
    loaded_library(x.dtype).fkv_quantize_rows(
        x.data_ptr(),
        factors.data_ptr(),
        None if ranges is None else ranges.data_ptr(),
        out.data_ptr(),
        scales.data_ptr(),
        rows,
        dim,
        num_threads(),
    )
    return out, scales


def native_quantize_gated(products: Tensor, scales: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return :func:`native_quantize_rows` of ``silu(gate) * up``, which are dense ``[R, 2 W]`` times `scales`."""
    rows, width = products.shape[0], products.shape[1] // 2
    out, out_scales = torch.empty(rows, width, dtype=torch.uint8), torch.empty(rows, dtype=torch.float32)
    pointers = (part.data_ptr() for part in (products, scales, factors, out, out_scales))
    loaded_library(products.dtype).fkv_quantize_gated(*pointers, rows, width, num_threads())
    return out, out_scales


def native_scale_rows(x: Tensor, scales: Tensor) -> None:
    """Multiply the rows of a dense matrix ``[R, O]`` by float32 ``[R]``, in place."""
    loaded_library(x.dtype).fkv_scale_rows(x.data_ptr(), scales.data_ptr(), *x.shape, num_threads())


def native_compress_rows(x: Tensor, smallest_scale: float) -> tuple[Tensor, Tensor]:
    """Return :func:`fused_kv_kernels.compress_rows` of dense rows."""
    dim = x.shape[-1]
    out, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
    loaded_library(x.dtype).fkv_compress_rows(
        x.data_ptr(), out.data_ptr(), scales.data_ptr(), x.numel() // dim, dim, smallest_scale, num_threads()
    )
    return out, scales


def native_gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return :func:`fused_kv_kernels.gated_silu` of ``[..., W]``."""
    out = torch.empty(gate.shape, dtype=gate.dtype)
    width = gate.shape[-1]
    loaded_library(gate.dtype).fkv_gated_silu(
        gate.data_ptr(),
        up.data_ptr(),
        out.data_ptr(),
        gate.numel() // width,
        width,
        gate.stride(-2),
        up.stride(-2),
        num_threads(),
    )
    return out


def native_rotate_rows(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn ``[B, H, R, D]`` in place, as :func:`fused_kv_kernels.rotate_rows_` does."""
    loaded_library(x.dtype).fkv_rotate_rows(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        int64_array(*x.shape[:3]),
        int64_array(*x.stride()[:3]),
        cos.shape[-1] // 2,
        0 if cos.shape[0] == 1 else cos.stride(0),
        num_threads(),
    )
