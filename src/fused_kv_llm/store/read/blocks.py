"""How bytes come out of a file: the one call that reads, and one that reads no faster than it is told."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

from fused_kv_llm.errors import ConfigError

__all__ = ["BlockReader", "ThrottledReader", "read_block"]


class BlockReader(Protocol):
    """Reads bytes of a file; called by several threads."""

    def __call__(self, fd: int, target: memoryview, offset: int) -> None:
        """Fill `target` with the file's bytes from `offset`; the GIL is free meanwhile.

        Raises
        ------
        OSError, EOFError
            The file cannot be read, or is too short.
        """


def read_block(fd: int, target: memoryview, offset: int) -> None:
    """Fill `target` with a file's bytes from `offset`, through the system's cache; raises as :class:`BlockReader`."""
    while target:
        count = os.preadv(fd, [target], offset)
        if count == 0:
            raise EOFError("the file was shortened")
        target = target[count:]
        offset += count


class ThrottledReader:
    """Reads at most so many bytes a second, to leave a part of a shared disk to others, or to see what a slow one does.

    All threads share the rate. It waits by sleeping, which takes nothing of the processor.

    Parameters
    ----------
    bytes_per_s : float
        More than 0.

    Raises
    ------
    ConfigError
        If the rate is not positive.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if not bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s={bytes_per_s!r} reads nothing: give a positive number of bytes a second")
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def __call__(self, fd: int, target: memoryview, offset: int) -> None:
        """Fill `target` with the file's bytes from `offset` once its turn is over."""
        with self._lock:
            # Turns follow each other without gaps: what a sleep takes too long does not add up.
            self._free_at_s = max(self._free_at_s, time.monotonic()) + len(target) / self._bytes_per_s
            wait_s = self._free_at_s - time.monotonic()
        time.sleep(max(0.0, wait_s))
        read_block(fd, target, offset)
