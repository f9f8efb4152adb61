"""What a caller holds of a request: its pieces as they come, its result, and the way to cancel it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType

from fused_kv_llm.errors import FusedKVError
from fused_kv_llm.online import Generation, Piece
from fused_kv_llm.report import FusionReport

__all__ = ["PieceStream", "RequestHandle"]


class RequestHandle:
    """A request that was submitted.

    Its pieces are for one consumer: :meth:`pieces`, :meth:`result` and their asynchronous likes take them from one
    queue. Whoever stops early calls :meth:`cancel`.

    Parameters
    ----------
    cancel : callable
        Has the engine drop the request at its next step. It may be called anywhere, also by the collector.
    report : FusionReport

    Attributes
    ----------
    report : FusionReport
        What is known of the request so far, which the engine goes on with; the last piece has it complete.
    on_report : callable or None
        Completes the report, once, in a thread of whoever takes the last piece.
    """

    def __init__(self, cancel: Callable[[], None], report: FusionReport) -> None:
        self._cancel, self.report = cancel, report
        # Reentrant, unlike a condition: the collector may drop a stream while this thread is inside it.
        self._items: SimpleQueue[Piece | BaseException] = SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self._first: Piece | None = None
        self._ended = False
        self._whole: Generation | None = None
        self._error: BaseException | None = None
        self.on_report: Callable[[FusionReport], None] | None = None
        self.done = False

    # -- for callers -----------------------------------------------------------------------------------------

    def pieces(self) -> Generator[Piece]:
        """Yield the pieces of the answer; closing the generator cancels the request.

        Yields
        ------
        Piece
            The last one has a finish reason and the report.

        Raises
        ------
        FusedKVError
            What ended the request.
        """
        try:
            while not self._ended:
                yield self._take(self._next())
        finally:
            self.cancel()

    def result(self) -> Generation:
        """Return the whole answer; again when it is called again.

        Raises
        ------
        FusedKVError
            What ended the request; or if its pieces were taken already.
        """
        if self._whole is None:
            self._whole = self._of(list(self.pieces()))
        return self._whole

    def wait_for_first(self) -> None:
        """Return when the first piece is there, which is still to be taken.

        Raises
        ------
        FusedKVError
            What ended the request before.
        """
        if self._first is None and not self._ended:
            try:
                item = self._items.get()
                if isinstance(item, BaseException):
                    self._take(item)
                else:
                    self._first = item
            except BaseException:
                self.cancel()
                raise

    async def pieces_async(self) -> AsyncGenerator[Piece]:
        """Yield the pieces of the answer without blocking the event loop; see :meth:`pieces`."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The loop may be closed by now.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(arrived.set)

        self._wake = wake
        try:
            while not self._ended:
                arrived.clear()
                try:
                    item = self._first or self._items.get_nowait()
                except Empty:
                    await arrived.wait()
                    continue
                if not isinstance(item, BaseException) and item.report is not None and self.on_report is not None:
                    # It may take a while, and the event loop has others to serve.
                    await asyncio.to_thread(self._complete, item.report)
                yield self._take(item)
        finally:
            self._wake = None
            self.cancel()

    async def result_async(self) -> Generation:
        """Return the whole answer without blocking the event loop; see :meth:`result`."""
        if self._whole is None:
            self._whole = self._of([piece async for piece in self.pieces_async()])
        return self._whole

    def cancel(self) -> None:
        """End the request at the engine's next step; one that has ended stays as it is."""
        if not self.done:
            self._cancel()

    # -- for the engine --------------------------------------------------------------------------------------

    def put(self, item: Piece | BaseException) -> None:
        """Hand over a piece, or the error that ends the request."""
        self.done = self.done or isinstance(item, BaseException) or item.finish_reason is not None
        self._items.put(item)
        wake = self._wake
        if wake is not None:
            wake()

    def _of(self, pieces: list[Piece]) -> Generation:
        if self._error is not None:
            raise self._error
        if not pieces:
            raise FusedKVError("The pieces of this answer were taken already: join their texts, or call result() only.")
        return Generation.of(pieces)

    def _next(self) -> Piece | BaseException:
        return self._first or self._items.get()

    def _take(self, item: Piece | BaseException) -> Piece:
        self._first = None
        if isinstance(item, BaseException):
            self._ended, self._error = True, item
            raise item
        self._ended = item.finish_reason is not None
        if item.report is not None:
            self._complete(item.report)
        return item

    def _complete(self, report: FusionReport) -> None:
        complete, self.on_report = self.on_report, None
        if complete is not None:
            complete(report)


class PieceStream(Generator[Piece]):
    """An answer as it streams. The request is cancelled when the stream is closed, or nobody refers to it any more.

    Parameters
    ----------
    handle : RequestHandle
    """

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._pieces = handle.pieces()

    def send(self, value: None) -> Piece:
        """Return the next piece; the same as ``next``."""
        return self._pieces.send(value)

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        error: BaseException | object = None,
        trace: TracebackType | None = None,
        /,
    ) -> Piece:
        """Raise an error where the answer stands, which ends it."""
        try:
            return self._pieces.throw(kind if isinstance(kind, BaseException) else kind())
        finally:
            self._handle.cancel()

    def __del__(self) -> None:
        """Cancel what is left."""
        self._handle.cancel()
