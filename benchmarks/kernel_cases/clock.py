"""Timing on whatever device there is, and the device's two ceilings as measured on it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Ceilings", "median_s", "once_s", "relative_error"]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches in the two things that kernels are made of.

    Parameters
    ----------
    flops_per_s : float
        Of a large matrix product of random numbers in the benchmark's dtype.
    bytes_per_s : float
        Of a large copy, bytes read plus bytes written.
    """

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def measure(cls, device: torch.device, dtype: torch.dtype, toy: bool) -> Ceilings:
        """Measure both: 8192 x 8192 and 4 GiB, or a toy's."""
        side, numel = (512, 2**20) if toy else (8192, 2**31)
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        source = torch.empty(numel, dtype=torch.uint8, device=device).random_(256)
        target = torch.empty_like(source)
        product_s = median_s(lambda: a @ b)
        copy_s = median_s(lambda: target.copy_(source))
        return cls(2 * side**3 / product_s, 2 * numel / copy_s)


def median_s(run: Callable[[], object], budget_s: float = 0.3) -> float:
    """Return the median seconds of a call after warming up: by device events on CUDA, by the clock elsewhere."""
    if torch.cuda.is_available():
        from triton.testing import do_bench

        run()
        return float(do_bench(run, warmup=50, rep=int(1000 * budget_s), return_mode="median")) / 1000
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < 20):
        times.append(once_s(run))
    return statistics.median(times)


def once_s(run: Callable[[], object]) -> float:
    """Return the seconds of one call, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return ``|got - want| / |want|``; NaN never passes."""
    error = float((got.float() - want.float()).norm() / want.float().norm())
    return float("inf") if math.isnan(error) else error
