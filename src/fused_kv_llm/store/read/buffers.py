"""The memory that chunks are read into.

Mapping fresh pages takes several times as long as reading a chunk from the page cache into them, so what nobody
uses any more is kept for the next chunk. Where there is a GPU the memory is pinned; torch keeps that itself.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import torch

__all__ = ["BufferPool"]

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_ROUND = 1 << 20


class BufferPool:
    """Gives out byte buffers and takes them back when the last tensor on them is gone; thread-safe.

    Parameters
    ----------
    max_kept_nbytes : int
        Most bytes kept for later.
    """

    def __init__(self, max_kept_nbytes: int) -> None:
        self._max_kept_nbytes = max_kept_nbytes
        self._kept: list[mmap.mmap] = []
        self._lock = threading.RLock()
        self._pinned = torch.cuda.is_available()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor of that many bytes with undefined content."""
        if self._pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        memory = self._reuse(nbytes)
        if memory is None:
            size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE)
        # torch holds on to the view, and the view's end is what gives the memory back.
        view = memoryview(memory)[:nbytes]
        weakref.finalize(view, self._give_back, memory).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def kept_nbytes(self) -> int:
        """Return the bytes kept for later."""
        with self._lock:
            return sum(map(len, self._kept))

    def clear(self) -> None:
        """Give what is kept back to the system."""
        with self._lock:
            self._kept.clear()

    def _reuse(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            fitting = [memory for memory in self._kept if nbytes <= len(memory) <= 2 * nbytes + _ROUND]
            if not fitting:
                return None
            best = min(fitting, key=len)
            self._kept.remove(best)
            return best

    def _give_back(self, memory: mmap.mmap) -> None:
        # Reentrant: the collector may end a view while this thread holds the lock.
        with self._lock:
            if self.kept_nbytes() + len(memory) <= self._max_kept_nbytes:
                self._kept.append(memory)
