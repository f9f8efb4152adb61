"""Writing KV in a background thread while the next batch computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch import Tensor

from fused_kv_llm.chunk import ChunkKV

from .batches import PendingChunk

__all__ = ["BackgroundWriter"]

_Side = dict[str, Tensor] | None
_Item = tuple[PendingChunk, ChunkKV, _Side]


class BackgroundWriter:
    """Writes chunks one after another; an error stops it and is raised in the thread that submits.

    Parameters
    ----------
    write : callable
        Writes one chunk and returns the bytes written.
    on_written : callable
        Called in the writer's thread after each chunk with the chunk and its bytes.
    max_pending : int
        Chunks that may wait; more make `submit` block, so that memory stays bounded.
    """

    def __init__(
        self,
        write: Callable[[PendingChunk, ChunkKV, _Side], int],
        on_written: Callable[[PendingChunk, int], None],
        max_pending: int = 32,
    ) -> None:
        self._write = write
        self._on_written = on_written
        self._queue: queue.Queue[_Item | None] = queue.Queue(max_pending)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fused-kv-writer", daemon=True)
        self._thread.start()

    def submit(self, chunk: PendingChunk, kv: ChunkKV, side: dict[str, Tensor] | None) -> None:
        """Queue a chunk, its KV and what goes beside it.

        Raises
        ------
        StoreError
            What an earlier write met.
        """
        self._raise_error()
        self._queue.put((chunk, kv, side))

    def close(self) -> None:
        """Write what is queued and stop; raises what a write met."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is not None:
                continue
            chunk, kv, side = item
            try:
                self._on_written(chunk, self._write(chunk, kv, side))
            except Exception as error:
                self._error = error
