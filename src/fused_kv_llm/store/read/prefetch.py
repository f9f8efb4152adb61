"""Loading chunks into the memory tier before anyone asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fused_kv_llm.errors import StoreError
from fused_kv_llm.store.read.loader import ChunkLoader
from fused_kv_llm.store.read.reader import ChunkReader
from fused_kv_llm.thread_pool import ThreadPool

__all__ = ["Prefetcher"]


class Prefetcher:
    """Reads whole chunks in a background thread, which is started when it is first needed.

    Parameters
    ----------
    reader : ChunkReader
        What reads the chunks and keeps them.
    budget_nbytes : int
        Most bytes loaded for one call; more would push out what the call loaded first.
    """

    def __init__(self, reader: ChunkReader, budget_nbytes: int) -> None:
        self._reader = reader
        self._budget_nbytes = budget_nbytes
        self._lock = threading.Lock()
        self._pool = ThreadPool(1, "fused-kv-prefetch")
        self._closed = threading.Event()

    def submit(self, keys: Sequence[str], fetch: Callable[[Sequence[str]], object]) -> None:
        """Start loading these chunks and return at once; `fetch` brings those to the disk that are not there."""
        if keys and self._budget_nbytes:
            self.run(lambda: self._load_all(keys, fetch))

    def run(self, task: Callable[[], object]) -> None:
        """Do something in the background thread, some time; nothing once it is closed."""
        with self._lock:
            if self._closed.is_set():
                return
            self._pool.executor().submit(task)

    def close(self) -> None:
        """Stop after the layer that is being read, and wait for the thread to end."""
        with self._lock:
            self._closed.set()
        self._pool.close()

    def _load_all(self, keys: Sequence[str], fetch: Callable[[Sequence[str]], object]) -> None:
        with suppress(StoreError, OSError):
            fetch(keys)
        loaded = 0
        for key in keys:
            # Whatever is wrong, the request that needs the chunk finds it too and warns its user.
            with suppress(StoreError, OSError):
                loaded += self._load(key, self._budget_nbytes - loaded)

    def _load(self, key: str, budget_nbytes: int) -> int:
        if self._closed.is_set():
            return 0
        source = self._reader.acquire(key)
        try:
            if not isinstance(source, ChunkLoader) or source.header.nbytes > budget_nbytes:
                return 0
            # Layer by layer, so that a request that joins waits for one layer and not for all.
            for layer in range(source.header.num_layers):
                if self._closed.is_set():
                    return 0
                source.load(layer, layer + 1)
            return source.header.nbytes
        finally:
            source.release()
