"""Sidecars that were read and verified, kept in memory while their files do not change."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["SideMemory"]

_Tensors = dict[str, torch.Tensor]
_Signature = tuple[int, int, int]

_REMEMBERED = 65536


class SideMemory:
    """The least recently used go first; thread-safe.

    A file that was replaced, deleted or altered has another inode, size or time, and is read again.

    Parameters
    ----------
    max_bytes : int
        Bytes of tensors to keep; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._kept: OrderedDict[str, tuple[_Signature, _Tensors, int]] = OrderedDict()
        self._asked: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: Path, load: Callable[[], _Tensors]) -> _Tensors:
        """Return a file's tensors, loading them if need be.

        Raises
        ------
        OSError
            There is no such file.
        Exception
            What `load` raises; nothing is kept then.
        """
        name, found = str(path), os.stat(path)
        signature = (found.st_ino, found.st_size, found.st_mtime_ns)
        with self._lock:
            entry = self._kept.get(name)
            if entry is not None and entry[0] == signature:
                self._kept.move_to_end(name)
                return entry[1]
        tensors = load()
        self._keep(name, signature, tensors)
        return tensors

    def is_wanted(self, path: Path) -> bool:
        """Return whether a file is kept, or was asked about before: then it is worth keeping.

        A file that is used once costs no memory that way.
        """
        name = str(path)
        with self._lock:
            if name in self._kept:
                return True
            if name in self._asked:
                return self._max_bytes > 0
            self._asked[name] = None
            while len(self._asked) > _REMEMBERED:
                self._asked.popitem(last=False)
            return False

    def _keep(self, name: str, signature: _Signature, tensors: _Tensors) -> None:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if nbytes > self._max_bytes:
            return
        with self._lock:
            self._drop(name)
            self._kept[name] = (signature, tensors, nbytes)
            self._nbytes += nbytes
            while self._nbytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> None:
        entry = self._kept.pop(name, None)
        if entry is not None:
            self._nbytes -= entry[2]

    def forget_all(self) -> None:
        """Keep nothing of what was read so far."""
        with self._lock:
            self._kept.clear()
            self._asked.clear()
            self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are kept."""
        return self._nbytes
