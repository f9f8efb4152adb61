"""The worker's side: reads spans into blocks and stores blocks, beside the forwards."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import takewhile

from torch import Tensor

from fused_kv_vllm.blocks import BlockCaches
from fused_kv_vllm.prefix_store import PrefixStore
from fused_kv_vllm.spans import PrefixSpan
from fused_kv_vllm.transfers import LoadRequest, SpanBlocks

__all__ = ["PrefixWorker"]

_READERS = 2
_IDLE_S = 0.01
_KV = tuple[Tensor, Tensor]


class PrefixWorker:
    """Moves spans between a store and the caches. Threads read and write files; only the caller touches the caches.

    Parameters
    ----------
    store : PrefixStore
    caches : BlockCaches
    writes_waiting : int
        Spans that may wait to be written.

    Attributes
    ----------
    not_written : int
        Spans that were not stored, since too many waited.
    """

    def __init__(self, store: PrefixStore, caches: BlockCaches, writes_waiting: int) -> None:
        self._store, self._caches, self._writes_waiting = store, caches, writes_waiting
        self._readers = ThreadPoolExecutor(_READERS, "fused-kv-read")
        self._writer = ThreadPoolExecutor(1, "fused-kv-write")
        self._reading: dict[str, tuple[LoadRequest, Future[list[_KV]]]] = {}
        self._writing: dict[str, Future[int]] = {}
        self._unread: set[int] = set()
        self.not_written = 0

    def begin(self, loads: Sequence[LoadRequest]) -> None:
        """Begin to read for requests."""
        for load in loads:
            self._reading[load.request_id] = load, self._readers.submit(self._read, load)

    def save(self, spans: Sequence[SpanBlocks]) -> None:
        """Store spans whose blocks are complete now; the blocks may change as soon as this returns."""
        for key in [key for key, write in self._writing.items() if write.done()]:
            # A store that cannot be written is a warning already: what comes out here is a defect.
            self._writing.pop(key).result()
        for one in spans:
            if one.span.key in self._writing:
                continue
            if len(self._writing) >= self._writes_waiting:
                self.not_written += 1
                continue
            self._writing[one.span.key] = self._writer.submit(self._write, one.span, *self._caches.gather(one.blocks))

    def finished(self, *, is_idle: bool) -> set[str]:
        """Put what has been read into its blocks.

        Parameters
        ----------
        is_idle : bool
            Whether there is nothing else to do, so that it may be waited for a little.

        Returns
        -------
        set of str
            The requests for which nothing is read any more, whether all of it could be read or not.
        """
        if is_idle and self._reading:
            wait([future for _, future in self._reading.values()], _IDLE_S, FIRST_COMPLETED)
        done = [name for name, (_, future) in self._reading.items() if future.done()]
        for name in done:
            load, future = self._reading.pop(name)
            self._place(load, future.result())
        return set(done)

    def take_unread(self) -> set[int]:
        """Return the blocks that were to be loaded and are not, and forget them."""
        unread, self._unread = self._unread, set()
        return unread

    def close(self) -> None:
        """Write what waits to be written, and end the threads."""
        self._readers.shutdown()
        self._writer.shutdown()

    def _read(self, load: LoadRequest) -> list[_KV]:
        """Return the KV of a request's spans, up to the first that cannot be read.

        What stands behind that one is read as well: damaged files are found now, and stored again with the first.
        """
        kv = [self._store.read(one.span, self._caches.layout) for one in load.spans]
        return list(takewhile(lambda one: one is not None, kv))  # type: ignore[arg-type]

    def _place(self, load: LoadRequest, found: Sequence[_KV]) -> None:
        for number, one in enumerate(load.spans):
            if number >= len(found) or not self._put(one, *found[number]):
                self._unread.update(one.blocks)

    def _put(self, one: SpanBlocks, keys: Tensor, values: Tensor) -> bool:
        if one.span.is_handed:
            return self._caches.write(keys, values, one.blocks, one.skipped)
        self._caches.scatter(keys, values, one.blocks, one.skipped)
        return True

    def _write(self, span: PrefixSpan, keys: Tensor, values: Tensor) -> int:
        return self._store.write(span, keys, values)
