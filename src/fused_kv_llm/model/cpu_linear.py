"""Linear layers in float32 on processors where oneDNN multiplies faster than MKL.

torch multiplies float32 with MKL, which uses AVX-512 on Intel's processors only. oneDNN, with which torch multiplies
bfloat16, uses it on all that have it: on two cores of an AMD EPYC (Zen 5) it measured 370 to 400 GFLOP/s where MKL
measured 180, at the shapes of SmolLM2-135M. Both compute in float32; they sum in different orders.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["linear_in_onednn", "onednn_is_faster"]


def linear_in_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x weight^T + bias`` in float32, without a gradient.

    Parameters
    ----------
    x : Tensor
        ``[..., I]``.
    weight : Tensor
        ``[O, I]``.
    bias : Tensor or None
        ``[O]``.

    Returns
    -------
    Tensor
        ``[..., O]``.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


@functools.lru_cache(maxsize=1)
def onednn_is_faster() -> bool:
    """Return whether float32 goes through oneDNN: the processor has AVX-512, is not Intel's, and torch can do it."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_both:
        return False
    return _has_avx512_that_mkl_ignores(_processor()) and _agrees_with_torch()


def _processor() -> str:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return ""
    return Path("/proc/cpuinfo").read_text()


def _has_avx512_that_mkl_ignores(description: str) -> bool:
    words = description.split()
    return "avx512f" in words and "GenuineIntel" not in words


def _agrees_with_torch() -> bool:
    """Try the operator once: it is internal to torch's compiler and may change."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, 7, 48), (33, 48), (33,)))
    try:
        with torch.inference_mode():
            got = [linear_in_onednn(x, weight, one) for one in (bias, None)]
    except (AttributeError, RuntimeError, TypeError):
        return False
    want: list[Any] = [torch.nn.functional.linear(x, weight, one) for one in (bias, None)]
    return all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(got, want, strict=True))
