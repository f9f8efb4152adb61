"""The memory that files are read into.

Mapping fresh pages takes several times as long as reading a chunk from the page cache into them, so a buffer that
nobody uses any more is kept for the next file. Pages are mapped for each read, just before it: the layers of a chunk
that are read beside the computation are mapped beside it as well. With a GPU the memory is pinned; torch itself keeps
pinned memory.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref

import torch

__all__ = ["ReadBuffers", "map_pages"]

# Since Linux 5.14; an older one says that it does not know it, and pages are mapped as they are written to.
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_ROUND = 1 << 16
# Smaller buffers come from the heap, which keeps memory for reuse by itself.
_MAPPED_NBYTES = 1 << 18


class ReadBuffers:
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

    def take(self, nbytes: int, *, briefly: bool = False) -> torch.Tensor:
        """Return a uint8 tensor of that many bytes with undefined content.

        Parameters
        ----------
        nbytes : int
        briefly : bool
            Whether it is needed for a moment only. Such memory is not kept: it would seldom fit the next file.
        """
        if self._pinned or briefly or nbytes < _MAPPED_NBYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        memory = self._reuse(nbytes)
        if memory is None:
            size = -(-nbytes // _ROUND) * _ROUND
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
            # The memory tier counts the bytes of tensors: a buffer is at most a quarter larger than what it holds.
            fitting = [memory for memory in self._kept if nbytes <= len(memory) <= nbytes + nbytes // 4 + _ROUND]
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


def map_pages(target: memoryview) -> None:
    """Map the pages of writable memory at once, which takes less time than one by one as they are written to."""
    if _libc is None or len(target) < mmap.PAGESIZE:
        return
    begin = ctypes.addressof(ctypes.c_char.from_buffer(target))
    first = begin - begin % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(begin + len(target) - first), _MADV_POPULATE_WRITE)
