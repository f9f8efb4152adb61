"""The requests that are loaded: taken from the queue, and not begun yet."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .means import MOST_PLANNED, Means
from .prompt_plan import AbandonedPlanError
from .served_request import RequestState, ServedRequest

__all__ = ["LoadingRequests"]

_log = logging.getLogger(__name__)

# Chunks of so many requests are found, opened and loaded while others are computed; those whose disk does not answer
# come on top, up to a limit.
_PLANNED_AHEAD = 4


class _Planning:
    """One planning of a request; the request may be planned again before this one comes back.

    Attributes
    ----------
    error : BaseException or None
        What the request ends with when its planning comes back.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None


class LoadingRequests:
    """Has requests planned, so that their chunks are opened and loaded; used by the thread that computes.

    Parameters
    ----------
    means : Means
        Its threads plan and load.
    post : callable
        Has the thread that computes call something.
    on_planned : callable
        Called with a request whose planning has come back, and what it ends with; with None, it is ready.

    Attributes
    ----------
    ready : deque of ServedRequest
        Those that are planned, in the order in which they began to be loaded.
    loads_ahead : bool
        Whether what they need is loaded while others are computed; off for measurements only.
    is_measuring : bool
        Whether :meth:`measure` has not come back yet.
    """

    def __init__(
        self,
        means: Means,
        post: Callable[[Callable[[], None]], None],
        on_planned: Callable[[ServedRequest, BaseException | None], None],
    ) -> None:
        self._means, self._post, self._on_planned = means, post, on_planned
        self.ready: deque[ServedRequest] = deque()
        self.loads_ahead = True
        self.is_measuring = False
        self._plannings: dict[ServedRequest, _Planning] = {}

    def __iter__(self) -> Iterator[ServedRequest]:
        """Iterate over a copy: those that are planned now, then those that are ready."""
        return iter([*self._plannings, *self.ready])

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._plannings) + len(self.ready)

    @property
    def has_place(self) -> bool:
        """Whether one more may be opened and loaded."""
        requests = list(self)
        if len(requests) >= MOST_PLANNED or sum(one.kv_nbytes for one in requests) > _most_bytes(requests):
            return False
        return sum(not one.prompt_plan.is_stuck for one in requests) < _PLANNED_AHEAD

    def add(self, request: ServedRequest, *, ahead: bool) -> None:
        """Have a request planned.

        Parameters
        ----------
        request : ServedRequest
        ahead : bool
            Whether others are computed meanwhile.
        """
        request.prompt_plan.asked_s = self._means.now_s()
        request.state = RequestState.LOADING
        self._plannings[request] = planning = _Planning()
        self._means.plan(self._plan, request, ahead, planning)

    def _plan(self, request: ServedRequest, ahead: bool, planning: _Planning) -> None:
        """Plan a request; called by a thread that plans."""
        error = None
        try:
            if self._plannings.get(request) is not planning:
                raise AbandonedPlanError
            request.plan(self._means.loader if self.loads_ahead else None, self._wake, ahead=ahead)
        except AbandonedPlanError:
            self._means.planner_came_back()
            return
        except BaseException as found:
            error = found
        self._post(partial(self._came_back, request, planning, error))

    def _wake(self) -> None:
        """Have the loop look again."""
        self._post(lambda: None)

    def _came_back(self, request: ServedRequest, planning: _Planning, error: BaseException | None) -> None:
        if self._plannings.get(request) is not planning:
            # It was given up just when it came back.
            self._means.planner_came_back()
            return
        del self._plannings[request]
        error = planning.error or error
        if error is None:
            self.ready.append(request)
        self._on_planned(request, error)

    def next(self, *, alone: bool) -> ServedRequest | None:
        """Return the first request of which enough is loaded, see :meth:`.PromptPlan.may_begin`."""
        return next((one for one in self.ready if one.prompt_plan.may_begin(alone=alone)), None)

    def remove(self, request: ServedRequest) -> None:
        """Take a request out, if it is here; if it is being planned, nobody waits for that."""
        self._plannings.pop(request, None)
        if request in self.ready:
            self.ready.remove(request)

    # -- those that are given up -----------------------------------------------------------------------------

    def give_up(self, request: ServedRequest, error: BaseException) -> bool:
        """Have a request end when its planning comes back; False if it is not being planned."""
        planning = self._plannings.get(request)
        if planning is None:
            return False
        planning.error = error
        return True

    def is_given_up(self, request: ServedRequest) -> bool:
        """Whether a request only waits for its planning to come back, and ends then."""
        planning = self._plannings.get(request)
        return planning is not None and planning.error is not None

    def abandon(self, request: ServedRequest) -> BaseException | None:
        """Take out a request whose loading hangs; return the error that it was to end with, if there is one."""
        planning = self._plannings.get(request)
        self.remove(request)
        if planning is None:
            return None
        self._means.replace_planner()
        return planning.error

    # -- those that wait -------------------------------------------------------------------------------------

    def measure(self, request: ServedRequest) -> None:
        """Have a thread find out how much of a queued prompt is cached; one prompt at a time, see `is_measuring`."""
        self._means.plan(self._measure, request)
        self.is_measuring = True

    def _measure(self, request: ServedRequest) -> None:
        try:
            request.measure()
        except Exception as error:
            # It is told when its turn comes.
            _log.debug("A queued prompt could not be measured: %s", error)
        finally:
            self._post(self._measured)

    def _measured(self) -> None:
        self.is_measuring = False


def _most_bytes(requests: Sequence[ServedRequest]) -> float:
    return min((one.home.limits.pool_bytes for one in requests), default=float("inf"))
