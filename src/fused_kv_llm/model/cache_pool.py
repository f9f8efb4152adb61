"""The memory of requests' caches, handed from one request to the next.

Mapping fresh pages for tens of megabytes of KV measured as long as filling them. Nothing reads what the last request
left in a buffer, since a pass attends only to positions that the present request has written.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["CachePool"]

# Sizes are rounded up to one of so many between a power of two and the next: requests of similar length share buffers.
_SIZES = 16


class CachePool:
    """Keeps released buffers for the next requests that fit into them; thread-safe.

    Parameters
    ----------
    dtype : torch.dtype
    device : torch.device
    max_bytes : int
        Most bytes that are kept while nobody uses them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, max_bytes: int = 2**30) -> None:
        self._dtype = dtype
        self._device = device
        self._max_bytes = max_bytes
        self._kept: list[Tensor] = []
        # Reentrant: the collector may end a dropped stream, which gives its buffer back, while this thread holds it.
        self._lock = threading.RLock()

    def take(self, numel: int, *, tightly: bool = False) -> Tensor:
        """Return a flat buffer of at least `numel` elements with undefined content.

        Parameters
        ----------
        numel : int
        tightly : bool
            Whether it may be larger by a quarter only: for who takes it to save memory.
        """
        # A much larger one would keep memory that this request does not need.
        most = numel + numel // 4 if tightly else 4 * numel
        with self._lock:
            fitting = [at for at, kept in enumerate(self._kept) if numel <= kept.numel() <= most]
            if fitting:
                return self._kept.pop(min(fitting, key=lambda at: self._kept[at].numel()))
        return torch.empty(_rounded(numel), dtype=self._dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Keep a buffer that nobody uses any more; where there are too many, the smallest go."""
        if buffer.nbytes > self._max_bytes:
            return
        with self._lock:
            self._kept.append(buffer)
            self._kept.sort(key=Tensor.numel, reverse=True)
            while self.kept_nbytes() > self._max_bytes:
                self._kept.pop()

    def kept_nbytes(self) -> int:
        """Return the bytes that are kept and that nobody uses."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._kept)


def _rounded(numel: int) -> int:
    step = max(1, (1 << numel.bit_length()) // 2 // _SIZES)
    return -(-numel // step) * step
