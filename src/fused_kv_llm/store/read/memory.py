"""The memory tier: files whose tensors were read and verified, never more bytes than allowed."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import torch

from fused_kv_llm.store.folder import FileVersion
from fused_kv_llm.store.format import FileHeader
from fused_kv_llm.store.index import Entry, EvictionQueue, Policy

__all__ = ["MemoryTier", "ResidentFile"]


@dataclass(frozen=True, slots=True)
class ResidentFile:
    """A chunk's file, or a sidecar, whose tensors are in memory.

    Parameters
    ----------
    version : FileVersion
        The file's when it was read: a file with another version is another one.
    header : FileHeader
        What the file says about itself.
    tensors : dict of str to torch.Tensor
        The stored tensors, on the CPU. Shared by everyone who opens the file.
    """

    version: FileVersion
    header: FileHeader
    tensors: dict[str, torch.Tensor]

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return views of pieces ``start`` to ``stop - 1``."""
        return {name: tensor[start:stop] for name, tensor in self.tensors.items()}

    def read_all(self) -> dict[str, torch.Tensor]:
        """Return all tensors."""
        return self.tensors

    def announce(self, start: int, stop: int) -> None:
        """Do nothing: all of it is there."""

    def release(self) -> None:
        """Do nothing: no file is open."""


class MemoryTier:
    """Byte-budgeted cache of files' tensors; thread-safe.

    Parameters
    ----------
    budget_nbytes : int
        Most bytes of tensors held at any time, chunks and sidecars together; 0 holds nothing. A file that a request
        still uses lives on after its eviction until the request lets go of it.
    policy : callable
        Which file to let go of first.

    Attributes
    ----------
    evictions : int
        Files that made room for others.
    """

    def __init__(self, budget_nbytes: int, policy: Policy) -> None:
        self.budget_nbytes = budget_nbytes
        self.evictions = 0
        self._files: dict[str, ResidentFile] = {}
        self._queue = EvictionQueue(policy)
        self._ticks = itertools.count()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, name: str, *, used: bool = True) -> ResidentFile | None:
        """Return a file by its name and, if it is `used`, count that; None if it is not held."""
        with self._lock:
            file = self._files.get(name)
            if file is not None and used:
                self._queue.touch(name, next(self._ticks))
            return file

    def put(self, file: ResidentFile) -> bool:
        """Hold a file, letting go of others first where there is no room; False if it is larger than the budget."""
        name, nbytes = file.header.file_name, file.header.nbytes
        if not self.budget_nbytes or nbytes > self.budget_nbytes:
            return False
        with self._lock:
            self._remove(name)
            while self._nbytes + nbytes > self.budget_nbytes:
                victim = self._queue.pop()
                if victim is None:
                    return False
                self._remove(victim)
                self.evictions += 1
            # What is let go of has to be read again, which costs its bytes. Policies divide by the size: it is never 0.
            self._queue.put(name, Entry(max(1, nbytes), cost=nbytes, used=next(self._ticks)))
            self._files[name] = file
            self._nbytes += nbytes
        return True

    def discard(self, name: str) -> None:
        """Let go of a file, if it is held."""
        with self._lock:
            self._remove(name)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            for name in list(self._files):
                self._remove(name)

    def usage(self) -> tuple[int, int]:
        """Return how many chunks are held, and the bytes of everything that is, sidecars included."""
        with self._lock:
            return sum(file.header.name is None for file in self._files.values()), self._nbytes

    def chunks(self) -> dict[str, int]:
        """Return the bytes of the chunks that are held, by their keys; those that were put in last come last."""
        with self._lock:
            files = [file.header for file in self._files.values() if file.header.name is None]
            return {header.key: header.nbytes for header in files}

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._files

    def _remove(self, name: str) -> None:
        self._queue.remove(name)
        file = self._files.pop(name, None)
        if file is not None:
            self._nbytes -= file.header.nbytes
