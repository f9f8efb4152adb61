"""The scheduler: who is loaded and let in, and whose rows the next step computes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fused_kv_llm.errors import ChunkDamagedError, DeadlineError, ReadTimeoutError, RequestCancelledError
from fused_kv_llm.model import ModelLock, RaggedError
from fused_kv_llm.online import STUCK_S, FusedPrompt

from .home import RequestHome
from .loading import LoadingRequests
from .means import Means, RealMeans
from .recovery import NextTry, Recovery
from .running_kv import RunningKV
from .served_request import RequestState, ServedRequest
from .waiting import WaitingRequests

__all__ = ["Scheduler"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

# A prompt is computed beside answers for so many times as long as their next tokens take: answers flow more evenly with
# less. With more, those that wait are answered sooner, and sooner together, which takes less time in all.
_SHARE_OF_ANSWERS = 1.25
_SHARE_WHILE_OTHERS_WAIT = 4.0
# After which a prompt that is computed alone lets others in, and may be cancelled.
_LONGEST_STEP_S = 0.25


class Scheduler:
    """Brings requests from stage to stage; used by the thread that computes.

    Parameters
    ----------
    lock : ModelLock
        Held during a forward.
    post : callable
        Has the thread that computes call something; other threads tell with it what they have done.
    on_end : callable
        Called with a request that has ended.
    may_drop : callable
        Whether a provisional request may be given up: whether it has not been confirmed by another thread meanwhile.
    means : Means or None
        Its clock, what computes and who helps; this machine, if None.

    Attributes
    ----------
    means : Means
    waiting : WaitingRequests
    loading : LoadingRequests
    recovery : Recovery
        Decides which requests are tried again.
    """

    def __init__(
        self,
        lock: ModelLock,
        post: Callable[[Callable[[], None]], None],
        on_end: Callable[[ServedRequest], None],
        may_drop: Callable[[ServedRequest], bool],
        means: Means | None = None,
    ) -> None:
        self.means = means or RealMeans()
        self.recovery = Recovery()
        self._lock, self._on_end, self._may_drop = lock, on_end, may_drop
        self.waiting = WaitingRequests()
        self.loading = LoadingRequests(self.means, post, self._planned)
        self._running: list[ServedRequest] = []
        self._kv = RunningKV(self._running, self.loading.ready)

    def rest(self) -> None:
        """End the threads that help; the next request starts them again."""
        self.means.rest()

    def requests(self) -> list[ServedRequest]:
        """Return those that have not ended."""
        return [*self.waiting, *self.loading, *self._running]

    @property
    def is_serving(self) -> bool:
        """Whether there are requests, besides prompts that are held until they are asked."""
        return any(request.state is not RequestState.HELD for request in self.requests())

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        if any(request.state is not RequestState.HELD for request in self._running):
            return True
        if self._next_with_room() is not None:
            return True
        return len(self.waiting) > 0 and self.loading.has_place

    @property
    def is_fusing(self) -> bool:
        """Whether a request is being fused, or can begin."""
        return self._is_any(RequestState.FUSING) or self._next_with_room() is not None

    @property
    def is_loading(self) -> bool:
        """Whether a request waits or is loaded."""
        return bool(self.loading or self.waiting)

    @property
    def is_decoding(self) -> bool:
        """Whether answers are being written."""
        return self._is_any(RequestState.DECODING)

    def _is_any(self, state: RequestState) -> bool:
        return any(request.state is state for request in self._running)

    def patience_s(self) -> float:
        """Return after how many seconds it is to look again, though nobody has told it anything."""
        waiting = (one.deadline_s for one in self.requests() if not self.loading.is_given_up(one))
        soonest_s = min(waiting, default=float("inf"))
        # Nobody says that a disk does not answer.
        most_s = STUCK_S if self.loading else float("inf")
        return max(0.0, min(most_s, soonest_s - self.means.now_s()))

    def step(self) -> None:
        """Do what is due: give up, plan ahead, let in, compute."""
        self._give_up_overdue()
        self._give_up_hung()
        self._make_way()
        self._plan_ahead()
        self.means.look()
        begun = self._let_in()
        answers = [request for request in self._running if request.state is RequestState.DECODING]
        fusing = next((request for request in self._running if request.state is RequestState.FUSING), None)
        if fusing is not None and answers and not (fusing.may_pause or self.recovery.is_apart(fusing)):
            self._compute_together(answers, fusing, is_new=fusing is begun)
            return
        started_s = self.means.now_s()
        if answers:
            self._compute([(request, None) for request in answers])
        if fusing is not None:
            prompt = self._attempt(fusing, self._advance, fusing, self.means.now_s() - started_s if answers else None)
            if prompt is not None:
                self._guarded(fusing, fusing.take, prompt)

    def _give_up_overdue(self) -> None:
        now_s = self.means.now_s()
        for request in self.requests():
            if request.deadline_s <= now_s and request.provisional:
                self.drop(request)
            elif request.deadline_s <= now_s and not self.loading.is_given_up(request):
                waited = f"{request.terms.timeout_s} s (timeout_s)"
                self.give_up(request, DeadlineError(f"The request was not answered within {waited}; it was "
                                                     f"{request.state.value} then."))  # fmt: skip

    def _give_up_hung(self) -> None:
        """Go on without stored KV that does not come; the threads that wait for it are left to themselves."""
        for request in self.loading:
            if request.prompt_plan.is_stuck and request.prompt_plan.is_hung:
                error = self.loading.abandon(request)
                if error is None:
                    self._go_on_without(request)
                else:
                    self._end(request, error)

    def _go_on_without(self, request: ServedRequest, lost_key: str | None = None) -> None:
        """Have a request planned again without chunks that do not come."""
        self.recovery.counts.given_up_loads += 1
        _log.warning("Stored KV has not come within %g s; it is computed instead.", request.home.limits.load_timeout_s)
        self._begin_anew(request, partial(request.give_up_loading, lost_key))

    def _make_way(self) -> None:
        """Give up what nobody has asked yet for those who have (RAGCache, algorithm 2).

        Prompts that are complete take memory only: they stay while there is enough.
        """
        provisional = [request for request in self.requests() if request.provisional]
        if not provisional or all(request.provisional for request in self.requests()):
            return
        waiting = next((request for request in self.loading.ready if not request.provisional), None)
        is_tight = waiting is not None and not self._has_room(waiting)
        for request in provisional:
            if is_tight or request.state is not RequestState.HELD:
                self.drop(request)

    def _plan_ahead(self) -> None:
        """Have the next requests' chunks found, opened and loaded."""
        self.means.loader.look()
        while self.loading.has_place:
            request = self.waiting.take()
            if request is None:
                return
            self._guarded(request, self._load, request)
        unmeasured = None if self.loading.is_measuring else self.waiting.unmeasured()
        if unmeasured is not None:
            self.loading.measure(unmeasured)

    def _load(self, request: ServedRequest) -> None:
        self.loading.add(request, ahead=bool(self._running or self.loading))

    def _planned(self, request: ServedRequest, error: BaseException | None) -> None:
        if error is None:
            self.waiting.charge(request, request.prompt_tokens)
        else:
            self._retry_or_end(request, error)

    def _let_in(self) -> ServedRequest | None:
        """Begin the next request that is loaded if there is room and no other is being fused; return it."""
        request = self._next_with_room()
        if request is None or self._is_any(RequestState.FUSING):
            return None
        self.loading.remove(request)
        self._running.append(request)
        self._attempt(request, self._begin, request)
        return request

    def _next_with_room(self) -> ServedRequest | None:
        """Return the next request that is loaded, if it can begin beside those that run."""
        alone = not self._running
        request = self.loading.next(alone=alone)
        if request is None or alone:
            return request
        return request if self._has_room(request) else None

    def _has_room(self, request: ServedRequest) -> bool:
        return len(self._running) < request.home.limits.num_seqs and self._kv.has_room(request)

    def _begin(self, request: ServedRequest) -> None:
        request.wants_shared = self._kv.wants_shared
        with self._lock:
            request.begin()

    def _advance(self, request: ServedRequest, answers_s: float | None) -> FusedPrompt | None:
        """Compute a prompt for some time, which depends on how long the next tokens of the answers took."""
        time_s, max_rows = _LONGEST_STEP_S, None
        if answers_s is not None:
            time_s = answers_s * (_SHARE_WHILE_OTHERS_WAIT if self.is_loading else _SHARE_OF_ANSWERS)
            max_rows = request.home.limits.layer_rows
        with self._lock:
            return request.advance(self.means.now_s() + time_s, max_rows)

    def _compute_together(self, answers: Sequence[ServedRequest], fusing: ServedRequest, *, is_new: bool) -> None:
        """Compute every answer's next token, and as many of a prompt's rows as there is room.

        A request that is new waits a step for its first slice, since its probe was one.
        """
        chosen: list[tuple[ServedRequest, int | None]] = [(request, None) for request in answers]
        if is_new:
            self._attempt(fusing, self._select, fusing)
        else:
            chosen.append((fusing, max(1, fusing.home.limits.batched_rows - len(answers))))
        self._compute(chosen)

    def _select(self, request: ServedRequest) -> None:
        with self._lock:
            request.select()

    def _compute(self, chosen: list[tuple[ServedRequest, int | None]]) -> None:
        started_s = self.means.now_s()
        requests = [request for request, _ in chosen]
        try:
            with self._lock:
                parts = [request.part(max_rows) for request, max_rows in chosen]
                found = self.means.forward(requests[0].home.context.loaded, parts)
        except RaggedError as error:
            # The others' rows are computed again with the next step.
            self._retry_or_end(requests[error.index], error.cause)
            return
        except BaseException as error:
            if len(chosen) == 1:
                self._retry_or_end(requests[0], error)
            else:
                self._compute_singly(chosen)
            return
        seconds = self.means.now_s() - started_s
        for request, logits in zip(requests, found, strict=True):
            self._guarded(request, request.computed, logits, seconds)

    def _compute_singly(self, chosen: Sequence[tuple[ServedRequest, int | None]]) -> None:
        """Compute the requests of a step that failed one by one: it fails again only for those whose fault it is.

        A prompt begins anew, since nobody knows what was written among its stored KV.
        """
        for request, max_rows in chosen:
            self.recovery.note(request)
            if request.state is RequestState.FUSING:
                self.recovery.set_apart(request)
                self._begin_anew(request)
            else:
                self._compute([(request, max_rows)])

    # -- ends ------------------------------------------------------------------------------------------------

    def _guarded(self, request: ServedRequest, run: Callable[..., object], *args: Any) -> None:
        """Do something for a request; what goes wrong is its own."""
        try:
            run(*args)
        except BaseException as error:
            self._replan_or_end(request, error)
        else:
            if request.is_done:
                self._end(request)

    def _attempt(self, request: ServedRequest, run: Callable[..., _T], *args: Any) -> _T | None:
        """Compute something for a request by itself; if that fails it may be tried again."""
        try:
            return run(*args)
        except BaseException as error:
            self._retry_or_end(request, error)
            return None

    def _retry_or_end(self, request: ServedRequest, error: BaseException) -> None:
        """Try a request again that could not be computed, or planned; end it if that is no use."""
        if isinstance(error, ChunkDamagedError) or request.is_done:
            self._replan_or_end(request, error)
            return
        if isinstance(error, ReadTimeoutError):
            self._go_on_without(request, error.key)
            return
        next_try = self.recovery.after(request, error)
        if next_try is NextTry.NONE:
            self._end(request, self.recovery.last_error(request, error))
        elif next_try is NextTry.ANEW:
            _log.info("A request begins anew, since it failed while it was %s: %r", request.state.value, error)
            self._begin_anew(request)

    def _begin_anew(self, request: ServedRequest, how: Callable[[], None] | None = None) -> None:
        """Have a request loaded again, after what `how` does; :meth:`.ServedRequest.begin_anew` if it is None."""
        self._take_out(request)
        self._guarded(request, how or request.begin_anew)
        if not request.is_done:
            self._guarded(request, self._load, request)

    def _take_out(self, request: ServedRequest) -> None:
        """Take a request out of the stage that it is in."""
        self.waiting.remove(request)
        self.loading.remove(request)
        if request in self._running:
            self._running.remove(request)

    def lose_device(self, home: RequestHome) -> None:
        """Begin all over with the requests of an engine whose KV was on a device that lost it."""
        self.recovery.counts.lost_devices += 1
        home.forget_device()
        for request in [*self.loading, *self._running]:
            if request.home is home and not self.loading.is_given_up(request):
                self.recovery.note(request)
                self._begin_anew(request)

    def _replan_or_end(self, request: ServedRequest, error: BaseException) -> None:
        """Plan a request again without a damaged chunk; end it if something else went wrong."""
        if request.is_done:
            # Its caller has the answer already.
            _log.warning("What a request held could not be given back: %s", error)
        if request.is_done or not isinstance(error, ChunkDamagedError):
            self._end(request, error)
        else:
            self._begin_anew(request, partial(request.plan_again, error))

    def go_on(self, request: ServedRequest, *how: Any) -> None:
        """Answer a provisional request, which was confirmed; see :meth:`.ServedRequest.go_on`."""
        if not request.is_done:
            self._guarded(request, request.go_on, *how)

    def drop(self, request: ServedRequest) -> None:
        """Give up a provisional request, unless it was confirmed meanwhile."""
        if not request.is_done and self._may_drop(request):
            self.give_up(request, RequestCancelledError("The request was provisional, and nobody asked for it."))

    def give_up(self, request: ServedRequest, error: BaseException) -> None:
        """End a request with an error, at once or when its chunks are open."""
        # While its chunks are being opened, another thread has it.
        if not request.is_done and not self.loading.give_up(request, error):
            self._end(request, error)

    def _end(self, request: ServedRequest, error: BaseException | None = None) -> None:
        self._take_out(request)
        try:
            request.end(error)
        except Exception as failure:
            # Its caller knows why it ended. The others go on.
            _log.warning("What a request held could not be given back: %s", failure)
        finally:
            self._on_end(request)
