"""Loading chunks and their sidecars into the memory tier before anyone asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fused_kv_llm.errors import StoreError
from fused_kv_llm.store.read.open_file import OpenFile
from fused_kv_llm.store.read.reader import FileReader
from fused_kv_llm.thread_pool import ThreadPool

__all__ = ["Prefetcher"]


class Prefetcher:
    """Reads whole files in a background thread, which is started when it is first needed.

    Parameters
    ----------
    reader : FileReader
        Reads the files and keeps them.
    budget_nbytes : int
        Most bytes loaded for one call; more would push out what the call loaded first.
    """

    def __init__(self, reader: FileReader, budget_nbytes: int) -> None:
        self._reader = reader
        self._budget_nbytes = budget_nbytes
        self._lock = threading.Lock()
        self._pool = ThreadPool(1, "fused-kv-prefetch")
        self._closed = threading.Event()

    def submit(self, keys: Sequence[str], sidecars: Sequence[str], fetch: Callable[[Sequence[str]], object]) -> None:
        """Start loading chunks and those of their sidecars that have these names, and return at once.

        Parameters
        ----------
        keys : sequence of str
            The chunks.
        sidecars : sequence of str
            Names of sidecars; a chunk need not have them.
        fetch : callable
            Brings those chunks to the disk that are not there.
        """
        if keys and self._budget_nbytes:
            self.run(lambda: self._load_all(keys, sidecars, fetch))

    def run(self, task: Callable[[], object]) -> None:
        """Do something in the background thread, some time; nothing once it is closed."""
        with self._lock:
            if self._closed.is_set():
                return
            self._pool.executor().submit(task)

    def close(self) -> None:
        """Stop after the piece that is being read, and wait for the thread to end."""
        with self._lock:
            self._closed.set()
        self._pool.close()

    def _load_all(self, keys: Sequence[str], sidecars: Sequence[str], fetch: Callable[[Sequence[str]], object]) -> None:
        with suppress(StoreError, OSError):
            fetch(keys)
        loaded = 0
        for key in keys:
            for name in (None, *sidecars):
                # Whatever is wrong, the request that needs the file finds it too and warns its user.
                with suppress(StoreError, OSError):
                    loaded += self._load(key, name, self._budget_nbytes - loaded)

    def _load(self, key: str, name: str | None, budget_nbytes: int) -> int:
        """Load one file if it is not in memory; return its bytes."""
        if self._closed.is_set():
            return 0
        file = self._reader.acquire(key, name, whole=True)
        try:
            if not isinstance(file, OpenFile) or file.header.nbytes > budget_nbytes:
                return 0
            # Piece by piece, so that a request that joins waits for one piece and not for all.
            for piece in range(file.header.num_pieces):
                if self._closed.is_set():
                    return 0
                file.load(piece, piece + 1)
            return file.header.nbytes
        finally:
            file.release()
