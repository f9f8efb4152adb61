"""Sharing cores with other processes: how OpenMP's workers wait depends on whether somebody else wants the cores.

Between two parallel operators, workers wait for less than they would take to wake up, so they spin, which is right
as long as nobody else needs the cores. Beside another busy process it is ruinous: the thread that a worker waits for is
not running, since the worker is. GNU's OpenMP spins for a moment only, and then sleeps, while it counts more workers
than cores. So when other processes keep the cores busy, some idle workers are added, and taken away afterwards. Two
cores, 32 tokens beside two busy threads of another process: see ``docs/serving.md``.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

from fused_kv_llm.thread_pool import available_cores, loaded_openmp

__all__ = ["CrowdedCores"]

_LOOK_EVERY_S = 0.25
# Of the time of one core: what others must use, and what must be left of all, to count as crowded.
_OTHERS = 0.2
_LEFT = 0.4
_STAT = Path("/proc/stat")


class CrowdedCores:
    """Lets OpenMP's workers sleep early while other processes want the cores; used by one thread.

    Attributes
    ----------
    is_crowded : bool
    """

    def __init__(self) -> None:
        self.is_crowded = False
        self._idle_workers: _IdleWorkers | None = None
        self._seen = self._now()

    def look(self) -> None:
        """Look who uses the cores, a few times a second, and let workers wait accordingly."""
        if time.monotonic() - self._seen[0] < _LOOK_EVERY_S:
            return
        before, self._seen = self._seen, self._now()
        elapsed, own, busy, idle = (new - old for new, old in zip(self._seen, before, strict=True))
        crowded = busy - own > _OTHERS * elapsed and idle < _LEFT * elapsed
        # Others that get no time while workers spin cannot be seen: what was crowded stays so until cores are idle.
        self.is_crowded = crowded or (self.is_crowded and busy - own > _OTHERS * elapsed)
        if self.is_crowded and self._idle_workers is None:
            self._idle_workers = _IdleWorkers()
        elif not self.is_crowded:
            self.end()

    def end(self) -> None:
        """Take idle workers away."""
        if self._idle_workers is not None:
            self._idle_workers.end()
            self._idle_workers = None

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        """Return seconds: of a clock, of this process's computing, and of the cores that it may use, busy and idle."""
        busy = idle = 0.0
        try:
            text = _STAT.read_text(encoding="ascii")
        except OSError:
            return time.monotonic(), 0.0, 0.0, 0.0
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        for line in text.splitlines():
            name, *ticks = line.split()
            if name in allowed:
                # user, nice, system, idle, waiting for disks, interrupts twice, stolen
                numbers = [int(tick) for tick in ticks[:8]]
                idle += numbers[3] + numbers[4]
                busy += sum(numbers) - numbers[3] - numbers[4]
        a_second = os.sysconf("SC_CLK_TCK")
        return time.monotonic(), time.process_time(), busy / a_second, idle / a_second


class _IdleWorkers:
    """Workers of OpenMP that sleep, in number as many as there are cores."""

    def __init__(self) -> None:
        self._over = threading.Event()
        library = loaded_openmp()
        if library is not None:
            threading.Thread(target=self._start, args=(library,), name="fused-kv-idle", daemon=True).start()

    def _start(self, library: ctypes.CDLL) -> None:
        # A parallel region that frees nothing: it leaves its workers behind for this thread, and they end with it.
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        library.GOMP_parallel(nothing, None, ctypes.c_uint(available_cores() + 1), ctypes.c_uint(0))
        self._over.wait()

    def end(self) -> None:
        """Have them end."""
        self._over.set()
