"""The step loop: one thread owns a model and computes, step by step, for all requests that it has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from fused_kv_llm.errors import (
    EngineClosedError,
    FusedKVError,
    QueueFullError,
    RequestCancelledError,
)
from fused_kv_llm.model import ModelLock, PieceSpeed, StoppedError
from fused_kv_llm.thread_pool import release_openmp_workers

from .handle import RequestHandle
from .home import RequestHome
from .ingestion_pieces import IngestionPieces, Piece
from .scheduler import Scheduler
from .served_request import ServedRequest

__all__ = ["StepLoop"]

T = TypeVar("T")

_IDLE_S = 5.0
# While others want the model's lock.
_POLL_S = 0.02


class StepLoop:
    """Serves the requests of all engines of one model.

    Callers' threads only leave messages; everything else happens in the loop's own thread, which is there while there
    are requests. Nothing here refers to the model, so that it is not kept alive.

    Parameters
    ----------
    lock : ModelLock
        Held during a forward.

    Attributes
    ----------
    scheduler : Scheduler
        What the loop's thread does for requests.
    """

    def __init__(self, lock: ModelLock) -> None:
        self._lock = lock
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget everything; a forked process has none of its parent's threads and answers none of its requests."""
        # A thread that is missing now may have held the one before.
        self._guard = threading.Lock()
        # Reentrant: the collector may drop a stream, and so cancel its request, anywhere.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.scheduler = Scheduler(self._lock, self._inbox.put, self._ended, self._may_drop)
        self._pieces = IngestionPieces()
        self._thread: threading.Thread | None = None
        self._closing: list[tuple[RequestHome | None, threading.Event]] = []
        self._requests = set[ServedRequest]()
        # Those of them that nobody has asked yet; one that is confirmed leaves it at once.
        self._provisional = set[ServedRequest]()

    # -- for callers' threads --------------------------------------------------------------------------------

    def submit(self, request: ServedRequest) -> None:
        """Take a request.

        Raises
        ------
        QueueFullError
            If too many wait already.
        EngineClosedError
            If the engine was closed.
        FusedKVError
            If a constraint asks: the thread that computes would wait for itself.
        """
        limits = request.home.limits
        self.check_caller()
        # The caller has embedded a question or loaded a model, perhaps; from now on the loop computes.
        release_openmp_workers()
        with self._guard:
            if request.home.closed:
                raise EngineClosedError("The engine was closed: make a new one, which finds what is stored.")
            others = self._others
            if others >= limits.queued + limits.num_seqs:
                raise QueueFullError(
                    f"{others} requests are being answered or wait, of which {limits.num_seqs} run at once "
                    f"(max_num_seqs) and {limits.queued} may wait (max_queued). Try again later, or raise max_queued."
                )
            self._requests.add(request)
            self._inbox.put(partial(self.scheduler.waiting.add, request))
            self._start()

    def check_caller(self) -> None:
        """Make sure that the caller may wait for an answer.

        Raises
        ------
        FusedKVError
            If it is a constraint: the thread that computes would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise FusedKVError(
                "A constraint cannot ask the model that it is called for: nobody would compute the answer."
            )

    @property
    def is_busy(self) -> bool:
        """Whether requests are being answered or wait, besides provisional ones."""
        with self._guard:
            return self._others > 0

    @property
    def open_requests(self) -> tuple[int, int]:
        """How many requests are being answered, and how many wait; provisional ones count too."""
        with self._guard:
            begun = [request.has_begun for request in self._requests if not request.is_done]
        return sum(begun), len(begun) - sum(begun)

    def ahead_of(self, handle: RequestHandle, *, of_all: bool) -> int | None:
        """Return how many that wait came before a request, of its tenant or of all; None if it does not wait."""
        with self._guard:
            waiting = [request for request in self._requests if not (request.has_begun or request.is_done)]
        own = next((request for request in waiting if request.handle is handle), None)
        if own is None:
            return None
        before = [request for request in waiting if request.arrived_s < own.arrived_s]
        return sum(of_all or request.home.tenant == own.home.tenant for request in before)

    @property
    def _others(self) -> int:
        """How many requests are open besides provisional ones; the guard is held."""
        return sum(not request.is_done for request in self._requests - self._provisional)

    @property
    def _open(self) -> int:
        with self._guard:
            return sum(not request.is_done for request in self._requests)

    def submit_provisional(self, request: ServedRequest) -> bool:
        """Take a request that nobody has asked yet, unless others are being answered; return whether it was taken."""
        self.check_caller()
        release_openmp_workers()
        with self._guard:
            if request.home.closed or self._others or len(self._provisional) >= request.home.limits.num_seqs:
                return False
            self._requests.add(request)
            self._provisional.add(request)
            self._inbox.put(partial(self.scheduler.waiting.add, request))
            self._start()
            return True

    def confirm(self, request: ServedRequest, *how: Any) -> bool:
        """Have a provisional request answered as :meth:`.ServedRequest.go_on` says; False if it has been given up."""
        # The search went on in the caller's thread after the proposal.
        release_openmp_workers()
        with self._guard:
            if request.is_dropped or request.handle.done:
                return False
            self._provisional.discard(request)
            self._inbox.put(partial(self.scheduler.go_on, request, *how))
            return True

    def drop(self, request: ServedRequest, successor_ids: Sequence[int] = ()) -> None:
        """Give a provisional request up at the next step; it may be called anywhere, also by the collector.

        Parameters
        ----------
        request : ServedRequest
        successor_ids : sequence of int
            The prompt that comes in its place.
        """

        def leave() -> None:
            request.successor_ids = successor_ids
            self.scheduler.drop(request)

        self._inbox.put(leave)

    def wake(self) -> None:
        """Have the loop look again when something is due."""
        self._inbox.put(lambda: None)

    def _may_drop(self, request: ServedRequest) -> bool:
        with self._guard:
            request.is_dropped = request in self._provisional
            return request.is_dropped

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fused-kv-steps", daemon=True)
            self._thread.start()

    def run(self, work: Callable[[], T], num_tokens: int = 0, stopped: Callable[[], bool] = lambda: False) -> T:
        """Have a piece of ingestion computed between the steps, and return what comes of it; see :class:`.ModelOwner`.

        Raises
        ------
        StoppedError
            If `stopped` says so before it has begun.
        EngineClosedError
            If the process ends.
        """
        if threading.current_thread() is self._thread:
            # A constraint that ingests: the model is its own at the moment.
            with self._lock:
                return work()
        if stopped():
            raise StoppedError
        release_openmp_workers()
        piece = Piece(work, num_tokens)
        with self._guard:
            self._start()
            self._inbox.put(partial(self._pieces.add, piece))
        return piece.result(stopped)

    def piece_tokens(self, most: int, speed: PieceSpeed | None = None) -> int:
        """Return how many tokens a piece of ingestion may compute now, at most `most`."""
        return self._pieces.piece_tokens(most, speed)

    def cancel(self, request: ServedRequest) -> None:
        """Give a request up at the next step."""
        error = RequestCancelledError("The request was cancelled before its answer was complete.")
        self._inbox.put(partial(self.scheduler.give_up, request, error))

    def lose_device(self, home: RequestHome) -> None:
        """Have the requests of an engine begin anew at the next step, since the device's KV was lost."""
        with self._guard:
            if self._thread is None:
                home.forget_device()
            else:
                self._inbox.put(partial(self.scheduler.lose_device, home))

    def give_up_waiting(self, error: BaseException) -> None:
        """Give up the requests that have not begun; a signal's handler may call it."""

        def give_up() -> None:
            for request in self.scheduler.requests():
                if not request.has_begun:
                    self.scheduler.give_up(request, error)

        self._inbox.put(give_up)

    def close(self, home: RequestHome | None = None) -> None:
        """Give up the requests of an engine, or all, and return when they have ended.

        The engine is marked as closed before, so that none is submitted after its requests were given up.
        """
        done, is_own = threading.Event(), threading.current_thread() is self._thread
        # Another thread may just be submitting; the loop's own never is.
        with nullcontext() if is_own else self._guard:
            thread = self._thread
        if thread is None:
            return

        def give_up() -> None:
            error = EngineClosedError("The engine was closed before the answer was complete.")
            for request in self.scheduler.requests():
                if home is None or request.home is home:
                    self.scheduler.give_up(request, error)
            if home is None:
                self._pieces.end()
            self._closing.append((home, done))

        self._inbox.put(give_up)
        # A constraint may close an engine in the loop's own thread.
        while not is_own and thread.is_alive() and not done.wait(0.1):
            continue

    # -- the loop --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                with torch.inference_mode():
                    if not self._serve_once():
                        return
            except BaseException as error:
                for request in self.scheduler.requests():
                    self.scheduler.give_up(request, error)

    def _serve_once(self) -> bool:
        """Take the messages, waiting for one if there is nothing to compute, and make a step; False at the end."""
        if not self.scheduler.has_work:
            try:
                self._inbox.get(timeout=min(_IDLE_S, self.scheduler.patience_s(), self._piece_due_s()))()
            except Empty:
                with self._guard:
                    if not self._requests and self._inbox.empty() and not self._pieces:
                        self._thread = None
                        self.scheduler.rest()
                        return False
        while True:
            try:
                self._inbox.get_nowait()()
            except Empty:
                break
        started_s = time.perf_counter()
        self.scheduler.step()
        self._tell_closed()
        if self.scheduler.is_serving:
            self._pieces.requests_had(time.perf_counter() - started_s)
        if self._piece_due_s() <= 0:
            with self._lock:
                self._pieces.compute_next()
        return True

    def _piece_due_s(self) -> float:
        """Return in how many seconds a piece of ingestion is due; infinity if steps come first."""
        states = self.scheduler
        due_s = self._pieces.due_s(fusing=states.is_fusing, loading=states.is_loading, decoding=states.is_decoding)
        return max(due_s, _POLL_S) if self._lock.is_wanted else due_s

    def _tell_closed(self) -> None:
        """Tell those who close an engine whose requests have all ended."""
        for home, done in self._closing:
            if not any(home is None or request.home is home for request in self.scheduler.requests()):
                done.set()
        self._closing = [one for one in self._closing if not one[1].is_set()]

    def _ended(self, request: ServedRequest) -> None:
        with self._guard:
            self._requests.discard(request)
            self._provisional.discard(request)
