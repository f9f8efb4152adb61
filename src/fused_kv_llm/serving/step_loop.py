"""The step loop: one thread owns a model and computes, step by step, for all requests that it has."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from fused_kv_llm.errors import (
    ChunkDamagedError,
    DeadlineError,
    EngineClosedError,
    FusedKVError,
    QueueFullError,
    RequestCancelledError,
)
from fused_kv_llm.model import ModelLock, RaggedError, StoppedError, forward_ragged, lock_of
from fused_kv_llm.online import STUCK_S
from fused_kv_llm.thread_pool import ThreadPool, release_openmp_workers

from .crowding import CrowdedCores
from .ingestion_pieces import IngestionPieces, Piece
from .loader import Loader
from .served_request import RequestHome, RequestState, ServedRequest
from .waiting import WaitingRequests

__all__ = ["StepLoop", "loop_of"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_IDLE_S = 5.0
# While others want the model's lock.
_POLL_S = 0.02
# Chunks of so many requests are found, opened and loaded while others are computed; those whose disk does not answer
# come on top, up to a limit.
_PLANNED_AHEAD = 4
_MOST_PLANNED = 16


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
    loads_ahead : bool
        Whether what queued requests need is loaded while others are computed; off for measurements only.
    """

    def __init__(self, lock: ModelLock) -> None:
        self._lock, self.loads_ahead = lock, True
        self._guard = threading.Lock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget everything; a forked process has none of its parent's threads and answers none of its requests."""
        # Reentrant: the collector may drop a stream, and so cancel its request, anywhere.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting = WaitingRequests()
        self._loading: set[ServedRequest] = set()
        self._given_up: dict[ServedRequest, BaseException] = {}
        self._ready: deque[ServedRequest] = deque()
        self._running: list[ServedRequest] = []
        self._planners = ThreadPool(_MOST_PLANNED, "fused-kv-plan")
        self._loader = Loader()
        self._pieces = IngestionPieces()
        self._cores = CrowdedCores()
        self._thread: threading.Thread | None = None
        self._closing: list[tuple[RequestHome | None, threading.Event]] = []
        self._open = 0

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
        if threading.current_thread() is self._thread:
            raise FusedKVError(
                "A constraint cannot ask the model that it is called for: nobody would compute the answer."
            )
        # The caller has embedded a question or loaded a model, perhaps; from now on the loop computes.
        release_openmp_workers()
        with self._guard:
            if request.home.closed:
                raise EngineClosedError("The engine was closed: make a new one, which finds what is stored.")
            if self._open >= limits.queued + limits.num_seqs:
                raise QueueFullError(
                    f"{self._open} requests are being answered or wait, of which {limits.num_seqs} run at once "
                    f"(max_num_seqs) and {limits.queued} may wait (max_queued). Try again later, or raise max_queued."
                )
            self._open += 1
            self._inbox.put(partial(self._waiting.add, request))
            self._start()

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

    def piece_tokens(self, most: int) -> int:
        """Return how many tokens a piece of ingestion may compute now, at most `most`."""
        return self._pieces.piece_tokens(most)

    def cancel(self, request: ServedRequest) -> None:
        """Give a request up at the next step."""
        error = RequestCancelledError("The request was cancelled before its answer was complete.")
        self._inbox.put(partial(self._give_up, request, error))

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
            for request in self._all():
                if home is None or request.home is home:
                    self._give_up(request, error)
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
                for request in self._all():
                    self._give_up(request, error)

    def _serve_once(self) -> bool:
        """Take the messages, waiting for one if there is nothing to compute, and make a step; False at the end."""
        if not self._has_work():
            try:
                self._inbox.get(timeout=min(self._patience_s(), self._piece_due_s()))()
            except Empty:
                with self._guard:
                    if self._open == 0 and self._inbox.empty() and not self._pieces:
                        self._thread = None
                        self._planners.close()
                        self._loader.close()
                        self._cores.end()
                        return False
        while True:
            try:
                self._inbox.get_nowait()()
            except Empty:
                break
        self._tell_closed()
        started_s = time.perf_counter()
        self.step()
        if self._open:
            self._pieces.requests_had(time.perf_counter() - started_s)
        if self._piece_due_s() <= 0:
            with self._lock:
                self._pieces.compute_next()
        return True

    def _piece_due_s(self) -> float:
        """Return in how many seconds a piece of ingestion is due; infinity if steps come first."""
        states = {request.state for request in self._running}
        due_s = self._pieces.due_s(
            fusing=RequestState.FUSING in states or self._next_with_room() is not None,
            loading=bool(self._loading or self._waiting or self._ready),
            decoding=RequestState.DECODING in states,
        )
        return max(due_s, _POLL_S) if self._lock.is_wanted else due_s

    def _tell_closed(self) -> None:
        """Tell those who close an engine whose requests have all ended."""
        for home, done in self._closing:
            if not any(home is None or request.home is home for request in self._all()):
                done.set()
        self._closing = [one for one in self._closing if not one[1].is_set()]

    def step(self) -> None:
        """Do what is due: give up, plan ahead, let in, compute."""
        self._give_up_overdue()
        self._plan_ahead()
        self._cores.look()
        begun = self._let_in()
        chosen = self._choose(begun)
        if chosen:
            self._compute(chosen)

    def _give_up_overdue(self) -> None:
        now_s = time.perf_counter()
        for request in self._all():
            if request.deadline_s <= now_s and request not in self._given_up:
                waited = f"{request.terms.timeout_s} s (timeout_s)"
                self._give_up(request, DeadlineError(f"The request was not answered within {waited}; it was "
                                                     f"{request.state.value} then."))  # fmt: skip

    def _plan_ahead(self) -> None:
        """Have the next requests' chunks found, opened and loaded."""
        self._loader.look()
        while self._may_plan():
            request = self._waiting.take()
            if request is None:
                return
            self._guarded(request, self._load, request)

    def _may_plan(self) -> bool:
        """Whether one more request may be opened and loaded ahead."""
        ahead = [*self._loading, *self._ready]
        if len(ahead) >= _MOST_PLANNED or sum(request.kv_nbytes for request in ahead) > _most_bytes(ahead):
            return False
        return sum(not request.is_stuck for request in ahead) < _PLANNED_AHEAD

    def _load(self, request: ServedRequest) -> None:
        ahead = bool(self._running or self._loading or self._ready)
        request.loading_since_s = time.perf_counter()
        self._planners.executor().submit(self._plan, request, ahead)
        request.state = RequestState.LOADING
        self._loading.add(request)

    def _plan(self, request: ServedRequest, ahead: bool) -> None:
        error = None
        try:
            request.plan(self._loader if self.loads_ahead else None, self._wake, ahead=ahead)
        except BaseException as found:
            error = found
        self._inbox.put(partial(self._planned, request, error))

    def _wake(self) -> None:
        """Have the loop look again."""
        self._inbox.put(lambda: None)

    def _planned(self, request: ServedRequest, error: BaseException | None) -> None:
        self._loading.discard(request)
        error = self._given_up.pop(request, error)
        if error is None:
            self._waiting.charge(request, request.prompt_tokens)
            self._ready.append(request)
        else:
            self._end(request, error)

    def _let_in(self) -> ServedRequest | None:
        """Begin the next request that is loaded if there is room and no other is being fused; return it."""
        request = self._next_with_room()
        if request is None or any(other.state is RequestState.FUSING for other in self._running):
            return None
        self._ready.remove(request)
        self._running.append(request)
        self._guarded(request, self._begin, request)
        return request

    def _next_with_room(self) -> ServedRequest | None:
        """Return the next request that is loaded, if it can begin beside those that run."""
        alone = not self._running
        request = next((request for request in self._ready if request.may_begin(alone=alone)), None)
        if request is None or alone:
            return request
        limits, used = request.home.limits, sum(other.kv_nbytes for other in self._running)
        room = len(self._running) < limits.num_seqs and used + request.kv_nbytes <= limits.pool_bytes
        return request if room else None

    def _begin(self, request: ServedRequest) -> None:
        with self._lock:
            request.begin()

    def _choose(self, begun: ServedRequest | None) -> list[tuple[ServedRequest, int | None]]:
        """Return whose rows the step computes: every answer's next token, and as many of a prompt's as there is room.

        A request that begins while others are answered waits a step for its first slice, since its probe was one.
        """
        decoding = [request for request in self._running if request.state is RequestState.DECODING]
        fusing = [request for request in self._running if request.state is RequestState.FUSING]
        chosen: list[tuple[ServedRequest, int | None]] = [(request, None) for request in decoding]
        if fusing and not decoding:
            chosen.append((fusing[0], None))
        elif fusing and fusing[0] is not begun:
            chosen.append((fusing[0], max(1, fusing[0].home.limits.batched_rows - len(decoding))))
        return chosen

    def _compute(self, chosen: list[tuple[ServedRequest, int | None]]) -> None:
        started_s = time.perf_counter()
        requests = [request for request, _ in chosen]
        try:
            with self._lock:
                parts = [request.part(max_rows) for request, max_rows in chosen]
                found = forward_ragged(requests[0].home.context.loaded, parts)
        except RaggedError as error:
            # The others' rows are computed again with the next step.
            self._fail(requests[error.index], error.cause)
            return
        except BaseException as error:
            # Nobody knows whose fault it is. Those that wait go on.
            for request in requests:
                self._fail(request, error)
            return
        seconds = time.perf_counter() - started_s
        for request, logits in zip(requests, found, strict=True):
            self._guarded(request, request.computed, logits, seconds)

    # -- ends ------------------------------------------------------------------------------------------------

    def _guarded(self, request: ServedRequest, run: Callable[..., object], *args: Any) -> None:
        """Do something for a request; what goes wrong is its own."""
        try:
            run(*args)
        except BaseException as error:
            self._fail(request, error)
        else:
            if request.is_done:
                self._end(request)

    def _fail(self, request: ServedRequest, error: BaseException) -> None:
        if request.is_done:
            # Its caller has the answer already.
            _log.warning("What a request held could not be given back: %s", error)
        if request.is_done or not isinstance(error, ChunkDamagedError):
            self._end(request, error)
            return
        self._running.remove(request)
        self._guarded(request, request.plan_again, error)
        if not request.is_done:
            self._guarded(request, self._load, request)

    def _give_up(self, request: ServedRequest, error: BaseException) -> None:
        if request in self._loading:
            # Its chunks are being opened by another thread.
            self._given_up[request] = error
        elif not request.is_done:
            self._waiting.remove(request)
            self._end(request, error)

    def _end(self, request: ServedRequest, error: BaseException | None = None) -> None:
        self._loading.discard(request)
        self._waiting.remove(request)
        for held in (self._ready, self._running):
            if request in held:
                held.remove(request)
        try:
            request.end(error)
        except Exception as failure:
            # Its caller knows why it ended. The others go on.
            _log.warning("What a request held could not be given back: %s", failure)
        finally:
            with self._guard:
                self._open -= 1

    def _all(self) -> list[ServedRequest]:
        return [*self._waiting, *self._loading, *self._ready, *self._running]

    def _has_work(self) -> bool:
        if self._running:
            return True
        if self._next_with_room() is not None:
            return True
        return len(self._waiting) > 0 and self._may_plan()

    def _patience_s(self) -> float:
        waiting = (request.deadline_s for request in self._all() if request not in self._given_up)
        soonest_s = min(waiting, default=float("inf"))
        # Nobody says that a disk does not answer.
        most_s = STUCK_S if self._loading or self._ready else _IDLE_S
        return max(0.0, min(most_s, soonest_s - time.perf_counter()))


def _most_bytes(ahead: Sequence[ServedRequest]) -> float:
    return min((request.home.limits.pool_bytes for request in ahead), default=float("inf"))


_loops: WeakKeyDictionary[Any, StepLoop] = WeakKeyDictionary()
_finding = threading.Lock()


def loop_of(model: Any) -> StepLoop:
    """Return the step loop of a transformers model; engines that share its weights share it."""
    with _finding:
        if model not in _loops:
            _loops[model] = StepLoop(lock_of(model))
        return _loops[model]


def _after_fork() -> None:
    """Begin anew in a forked process, where the thread is missing that may have held what guards a loop."""
    global _finding  # noqa: PLW0603 - a lock that was held cannot be let go here
    _finding = threading.Lock()
    for loop in list(_loops.values()):
        loop._guard = threading.Lock()
        loop._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_all() -> None:
    for loop in list(_loops.values()):
        loop.close()
