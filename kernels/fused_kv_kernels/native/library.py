"""The native CPU operators as libraries, one for each dtype.

bfloat16 needs a processor that multiplies it (AVX512-BF16), float32 one with AVX2. Without the processor, or without
both a prebuilt library and a compiler, torch does the work.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import threading
import warnings
from dataclasses import dataclass

import torch

from .loading import opened_library
from .processor import processor_features

__all__ = ["int64_array", "kept_array", "loaded_library", "native_library", "num_threads", "opened", "why_not_native"]

_POINTER, _NUMBER, _REAL, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_FLAG = ctypes.c_int
_ARGUMENTS = {
    "fkv_row_attention_scratch": [_POINTER, _THREADS],
    "fkv_row_attention": [*[_POINTER] * 10, _REAL, _REAL, _THREADS],
    "fkv_eight_bit_attention_scratch": [_POINTER],
    "fkv_eight_bit_attention": [*[_POINTER] * 9, _REAL, _THREADS],
    "fkv_eight_bit_sizes": [_POINTER],
    "fkv_eight_bit_linear": [*[_POINTER] * 4, *[_NUMBER] * 3, _REAL, _THREADS],
    "fkv_eight_bit_mlp": [*[_POINTER] * 8, _REAL, _THREADS],
    "fkv_decode_attention_scratch": [_POINTER, _POINTER],
    "fkv_decode_attention": [*[_POINTER] * 5, _NUMBER, *[_POINTER] * 5, _REAL, _REAL, _THREADS],
    "fkv_span_sizes": [_POINTER],
    "fkv_decode_views_scratch": [_NUMBER, _POINTER],
    "fkv_decode_views": [*[_POINTER] * 14, _REAL, _REAL, _THREADS],
    "fkv_token_scores": [*[_POINTER] * 8, _REAL, _REAL, _THREADS],
    "fkv_place_chunks": [_POINTER, _NUMBER, _NUMBER, *[_POINTER] * 5],
    "fkv_place_int8_chunks": [_POINTER, _NUMBER, _NUMBER, *[_POINTER] * 5],
    "fkv_shift_chunks": [_POINTER, _NUMBER, _NUMBER, *[_POINTER] * 6],
    "fkv_add_change": [*[_POINTER] * 6, _REAL, _FLAG, _FLAG, _THREADS],
    "fkv_compress_rows": [*[_POINTER] * 3, _NUMBER, _NUMBER, _REAL, _THREADS],
    "fkv_rms_norm": [*[_POINTER] * 3, _NUMBER, _NUMBER, _REAL, _THREADS],
    "fkv_gated_silu": [*[_POINTER] * 3, *[_NUMBER] * 4, _THREADS],
    "fkv_quantize_rows": [*[_POINTER] * 5, _NUMBER, _NUMBER, _THREADS],
    "fkv_quantize_gated": [*[_POINTER] * 5, _NUMBER, _NUMBER, _THREADS],
    "fkv_scale_rows": [*[_POINTER] * 2, _NUMBER, _NUMBER, _THREADS],
    "fkv_rotate_rows": [*[_POINTER] * 5, _NUMBER, _NUMBER, _THREADS],
    "fkv_transfer": [*[_POINTER] * 8, _NUMBER, *[_POINTER] * 7],
}
_OWN_ARGUMENTS = {
    "bfloat16": {
        "fkv_linears": [*[_POINTER] * 2, *[_NUMBER] * 3, _THREADS],
        "fkv_float_linear": [*[_POINTER] * 2, *[_NUMBER] * 2, _THREADS],
        "fkv_heads": [*[_POINTER] * 8, _REAL, _REAL, _THREADS],
        "fkv_residual_norm": [*[_POINTER] * 3, *[_NUMBER] * 2, _REAL, _THREADS],
        "fkv_gated_mlp": [*[_POINTER] * 5, *[_NUMBER] * 2, _REAL, _THREADS],
        "fkv_attended_mlp": [*[_POINTER] * 6, *[_NUMBER] * 3, _REAL, _THREADS],
        "fkv_decode_layers_scratch": [_POINTER],
        "fkv_decode_layers": [*[*[_POINTER] * 3, _NUMBER] * 2, *[_POINTER] * 4, _REAL, _THREADS],
    }
}
_lock = threading.Lock()
_found: dict[torch.dtype, tuple[ctypes.CDLL | None, str | None]] = {}


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the library of a dtype is made of, and how near to torch its results are."""

    folder: str
    features: frozenset[str]
    tolerance: float


_KINDS = {
    torch.bfloat16: _Kind(
        "bfloat16", frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}), tolerance=2e-2
    ),
    torch.float32: _Kind("float32", frozenset({"avx2", "fma"}), tolerance=1e-5),
}


def native_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the native operators of a dtype, compiled if need be, or None where they cannot run.

    ``FUSED_KV_KERNELS=torch`` turns them off. Where the processor could run them and only a compiler is missing, a
    warning says so, once.
    """
    return _loaded(dtype)[0]


def loaded_library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the native operators of a dtype where they are known to be available."""
    library = native_library(dtype)
    if library is None:
        msg = f"there are no native CPU operators of {dtype} here"
        raise RuntimeError(msg)
    return library


def why_not_native(dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Return why torch does the work of a dtype's native operators, or None if it does not."""
    return _loaded(dtype)[1]


def _loaded(dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str | None]:
    # Asked at every call: whoever sets the variable to compare must not get the native operators all the same.
    if os.environ.get("FUSED_KV_KERNELS") == "torch":
        return None, "FUSED_KV_KERNELS=torch"
    if dtype not in _found:
        with _lock:
            if dtype not in _found:
                _found[dtype] = _load(dtype)
    return _found[dtype]


def _load(dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str | None]:
    kind = _KINDS.get(dtype)
    if kind is None:
        return None, f"there are native operators of {' and '.join(map(str, _KINDS))} only"
    missing = sorted(kind.features - processor_features())
    if missing:
        return None, f"the processor lacks {', '.join(missing)}"
    try:
        library = opened(kind.folder)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or ""
        reason = f"the native CPU operators could not be built: {error} {output.strip()[:500]}".rstrip()
        return None, _warned(reason, "Install a C++ compiler (Debian: g++)")
    if not _agrees_with_torch(library, dtype, kind.tolerance):
        return None, _warned("the native CPU operators compute something else than torch here", "Report your processor")
    return library, None


def _warned(reason: str, remedy: str) -> str:
    warnings.warn(
        f"{reason}\nTorch does their work, two to three times slower. {remedy}, or set FUSED_KV_KERNELS=torch to be "
        "content with torch.",
        RuntimeWarning,
        stacklevel=5,
    )
    return reason


def _agrees_with_torch(library: ctypes.CDLL, dtype: torch.dtype, tolerance: float) -> bool:
    """Run one small row attention: which instructions a processor and its hypervisor really have shows in use only."""
    generator = torch.Generator().manual_seed(0)
    rows, keys, dim = 40, 300, 64
    q, k, v = (torch.randn(1, 1, n, dim, generator=generator).to(dtype) for n in (rows, keys, keys))
    positions, out = torch.arange(keys - rows, keys), torch.empty(1, 1, rows, dim, dtype=dtype)
    shape = int64_array(1, 1, 1, rows, keys, dim, dim)
    scratch = torch.empty(library.fkv_row_attention_scratch(shape, num_threads()), dtype=torch.uint8)
    strides = int64_array(*(step for tensor in (q, k, v, out) for step in tensor.stride()[:3]))
    operands = (tensor.data_ptr() for tensor in (q, k, v, out, positions))
    options = None, None, scratch.data_ptr(), shape, strides, dim**-0.5, 0.0
    library.fkv_row_attention(*operands, *options, num_threads())
    mask = torch.arange(keys) <= positions[:, None]
    # Whoever asks first may do so under autocast.
    with torch.autocast("cpu", enabled=False):
        want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
    return torch.allclose(out.float(), want, atol=tolerance, rtol=tolerance)


def opened(folder: str, *extra_flags: str) -> ctypes.CDLL:
    """Return the library of one dtype's folder, ready to be called; with flags for the compiler, compiled here."""
    return opened_library(folder, functools.partial(_declared, folder=folder), *extra_flags)


def _declared(library: ctypes.CDLL, folder: str) -> ctypes.CDLL:
    for name, arguments in {**_ARGUMENTS, **_OWN_ARGUMENTS.get(folder, {})}.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = _NUMBER if name.endswith("_scratch") else None
    return library


def int64_array(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """Return numbers as the operators take shapes and strides."""
    return (ctypes.c_int64 * len(values))(*values)


@functools.lru_cache(maxsize=256)
def kept_array(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Return the same of shapes and strides that come again with every layer; operators only read them."""
    return int64_array(*values)


def num_threads() -> int:
    """Return torch's number of threads: the operators use as many, from the same pool."""
    return torch.get_num_threads()
