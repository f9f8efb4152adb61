"""Timing on whatever device there is, and the device's two ceilings as measured on it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Ceilings", "host_s", "median_s", "once_s", "relative_error"]

# At least as fast as any device's clock: sleeping for longer than meant does no harm.
_CLOCK_HZ = 2.5e9
# Larger than any device's second-level cache.
_SWEEP_NBYTES = 256 * 2**20


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
    """Return the median seconds of a call after warming up: of the device on CUDA, by the clock elsewhere."""
    run()
    if torch.cuda.is_available():
        return _device_median_s(run, budget_s)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < 20):
        times.append(once_s(run))
    return statistics.median(times)


def _device_median_s(run: Callable[[], object], budget_s: float) -> float:
    """Return the median seconds that a call keeps the device busy.

    The device sleeps before each call for longer than the host needs to queue it: otherwise it would wait for the host
    between the events, and operators of some microseconds would be timed by what Python takes (:func:`host_s` tells
    that). Caches are swept before each call.
    """
    host = host_s(run)
    cycles = int((2 * host + 5e-5) * _CLOCK_HZ)
    sweep = torch.empty(_SWEEP_NBYTES, dtype=torch.uint8, device="cuda")
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    rounds = max(3, min(100, int(budget_s / max(once_s(run), 1e-6))))
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sweep.zero_()
        torch.cuda._sleep(cycles)
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1000


def host_s(run: Callable[[], object]) -> float:
    """Return the median seconds until a call returns; on CUDA, with the device idle, that is what queueing it takes."""
    times: list[float] = []
    for _ in range(3):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
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
    """Return ``|got - want| / |want|``; NaN never passes. Head by head: all in float32 may be too many bytes."""
    gap = size = 0.0
    for a, b in zip(got.flatten(0, -3), want.flatten(0, -3), strict=True):
        gap += float((a.float() - b.float()).square().sum(dtype=torch.float64))
        size += float(b.float().square().sum(dtype=torch.float64))
    error = math.sqrt(gap / size)
    return float("inf") if math.isnan(error) else error
