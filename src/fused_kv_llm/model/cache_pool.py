"""The memory of requests' caches, handed from one request to the next.

Mapping fresh pages for tens of megabytes of KV measured as long as filling them. One buffer is kept; concurrent
requests allocate their own. Nothing reads what the last request left in it, since a pass attends only to positions that
the present request has written.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["CachePool"]


class CachePool:
    """Keeps the last released buffer for the next request that fits into it; thread-safe.

    Parameters
    ----------
    dtype : torch.dtype
    device : torch.device
    max_bytes : int
        Larger buffers are not kept.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, max_bytes: int = 2**30) -> None:
        self._dtype = dtype
        self._device = device
        self._max_bytes = max_bytes
        self._kept: Tensor | None = None
        # Reentrant: the collector may end a dropped stream, which gives its buffer back, while this thread holds it.
        self._lock = threading.RLock()

    def take(self, numel: int) -> Tensor:
        """Return a flat buffer of at least `numel` elements with undefined content."""
        with self._lock:
            kept, self._kept = self._kept, None
        # A much larger one would keep memory that this request does not need.
        if kept is not None and numel <= kept.numel() <= 4 * numel:
            return kept
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Keep a buffer that nobody uses any more; of two the larger stays."""
        if buffer.nbytes > self._max_bytes:
            return
        with self._lock:
            if self._kept is None or self._kept.numel() < buffer.numel():
                self._kept = buffer
