"""What becomes of a request whose step has failed (RAGCache, section 6): it is tried again, but not for ever.

Rows that were written before the step are valid, and the step's own rows are written again whatever it has left there.
So an answer that is being written goes on from the KV it has. If that fails as well, or its prompt was not complete,
the request begins anew: its prompt is planned again, with what the prefix tree and the store have of it, and the tokens
that were sent are computed behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from weakref import WeakSet

from fused_kv_llm.errors import FusedKVError, StepFailedError

from .served_request import RequestState, ServedRequest

__all__ = ["NextTry", "Recovery", "RecoveryCounts"]


class NextTry(Enum):
    """How a request goes on."""

    STEP = "its last step is computed again"
    ANEW = "it is planned and computed again"
    NONE = "it ends"


@dataclass(slots=True)
class RecoveryCounts:
    """What happened to a model's requests so far.

    Parameters
    ----------
    retries : int
        Steps that were computed again, and requests that began anew.
    failed : int
        Requests that ended since they had been tried too often.
    given_up_loads : int
        Loadings that did not come back in time.
    lost_devices : int
        How often the device's KV was lost.
    """

    retries: int = 0
    failed: int = 0
    given_up_loads: int = 0
    lost_devices: int = 0


class Recovery:
    """Decides which requests are tried again; used by the thread that computes.

    Attributes
    ----------
    counts : RecoveryCounts
    """

    def __init__(self) -> None:
        self.counts = RecoveryCounts()
        self._apart = WeakSet[ServedRequest]()

    def after(self, request: ServedRequest, error: BaseException) -> NextTry:
        """Return how a request goes on whose own step has failed.

        Errors that say what is wrong are told as they are: a prompt that is too long, a deadline, a model that was
        changed. Everything else may be over the next time.

        Parameters
        ----------
        request : ServedRequest
        error : BaseException
        """
        if isinstance(error, (FusedKVError, KeyboardInterrupt)) or request.failures >= request.home.limits.retries:
            return NextTry.NONE
        request.failures += 1
        self.note(request)
        is_first = request.failures == 1
        return NextTry.STEP if is_first and request.state is RequestState.DECODING else NextTry.ANEW

    def note(self, request: ServedRequest) -> None:
        """Count that something of a request is computed again."""
        request.report.retries += 1
        self.counts.retries += 1

    def set_apart(self, request: ServedRequest) -> None:
        """Have a prompt computed by itself from now on, since a step failed in which it was one of several."""
        self._apart.add(request)

    def is_apart(self, request: ServedRequest) -> bool:
        """Whether a prompt is to be computed by itself."""
        return request in self._apart

    def last_error(self, request: ServedRequest, error: BaseException) -> BaseException:
        """Return what a request ends with that is not tried again."""
        if isinstance(error, (FusedKVError, KeyboardInterrupt)):
            return error
        self.counts.failed += 1
        tried, most = request.failures + 1, request.home.limits.retries
        failure = StepFailedError(
            f"The request failed while it was {request.state.value}, {tried} times in a row (max_step_retries={most}), "
            f"with {type(error).__name__}: {error}. Others are not affected. Ask again once its cause is gone."
        )
        failure.__cause__ = error
        return failure
