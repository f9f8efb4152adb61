"""Actors that hold the model through all passes: tasks go to those that are ready, those that die are replaced.

Ray would restart an actor too. Here a task is given to no actor that has not loaded its model, so that a cluster with
room for some of the actors works with those; a task whose actor died goes to another at once; and what happened is
counted for the summary.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fused_kv_llm.errors import (
    FusedKVError,
    FusedKVWarning,
    IngestionFailedError,
    StoreFullError,
    StoreUnavailableError,
)

from .resources import import_ray

__all__ = ["ActorPool"]

_IN_FLIGHT = 2
_ATTEMPTS = 4
_WAIT_S = 60.0
# Doubles with each start of an actor that failed.
_AGAIN_AFTER_S = 1.0
_log = logging.getLogger(__name__)
Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True)
class _Start:
    """An actor that loads its model, the ``attempt``-th in its place."""

    actor: Any
    attempt: int


class ActorPool(Generic[Facts]):
    """Runs tasks on a fixed number of actors; used by one thread.

    Parameters
    ----------
    make : callable
        Makes an actor, whose ``start()`` loads the model.
    count : int
        Actors.

    Attributes
    ----------
    replaced : int
        Actors that died and were replaced.
    given_up : int
        Places for an actor that stay empty, since none could be started in them.
    retried : int
        Tasks that were given to an actor once more.
    """

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self._ray, self._make = import_ray(), make
        self._starting: dict[Any, _Start] = {}
        # When places are tried again, and which attempt that is.
        self._due: list[tuple[float, int]] = []
        self._ready: list[Any] = []
        self._facts: Facts | None = None
        self.replaced = self.given_up = self.retried = 0
        for _ in range(count):
            self._start()

    def facts(self) -> Facts:
        """Return what the first actor's ``start()`` has returned, once it has.

        Raises
        ------
        FusedKVError
            What it has raised. That the shared store could not be reached ends it only after some attempts.
        IngestionFailedError
            If actors keep dying while they load the model.
        """
        while self._facts is None:
            self._began(self._wait([]))
        return self._facts

    def run(self, method: str, tasks: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Run tasks, and yield their numbers and results as they come.

        Parameters
        ----------
        method : str
            Of the actors.
        tasks : iterable of tuple
            Arguments; taken as actors have time for them.

        Raises
        ------
        FusedKVError
            What a task has raised. That the shared store could not be reached ends it only after some attempts.
        IngestionFailedError
            If a task's actors keep dying.
        """
        source, again = enumerate(tasks), deque[tuple[int, tuple[Any, ...]]]()
        running: dict[Any, tuple[Any, int, tuple[Any, ...]]] = {}
        attempts, load = Counter[int](), Counter[Any]()
        while True:
            for actor in self._ready:
                while load[actor] < _IN_FLIGHT and (task := again.popleft() if again else next(source, None)):
                    running[getattr(actor, method).remote(*task[1])] = (actor, *task)
                    load[actor] += 1
            if self._ready and not running:
                # Those who have time were given nothing: there is nothing left.
                return
            done = self._wait(list(running))
            if done in self._starting:
                self._began(done)
                continue
            actor, number, arguments = running.pop(done)
            load[actor] -= 1
            try:
                result = self._ray.get(done)
            except self._ray.exceptions.RayError as error:
                cause = self._cause(actor, error)
                attempts[number] += 1
                if attempts[number] >= _ATTEMPTS:
                    raise cause from None
                self.retried += 1
                _log.warning("A batch is computed again: %s", cause)
                again.append((number, arguments))
            else:
                yield number, result

    def close(self) -> None:
        """End the actors."""
        for actor in (*self._ready, *(start.actor for start in self._starting.values())):
            self._ray.kill(actor)
        self._ready.clear()
        self._starting.clear()
        self._due.clear()

    def _start(self, attempt: int = 1) -> None:
        actor = self._make()
        self._starting[actor.start.remote()] = _Start(actor, attempt)

    def _began(self, started: Any) -> None:
        """Take an actor that has loaded its model; have another one started later if it failed."""
        start = self._starting.pop(started)
        try:
            self._facts = self._ray.get(started)
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.RayTaskError):
                cause = _of(error)
                if not isinstance(cause, StoreUnavailableError):
                    raise cause from None
                # What it has opened goes with it.
                self._ray.kill(start.actor)
            else:
                cause = IngestionFailedError(
                    f"Actors keep dying while they load the model: {error}. Look for their memory in Ray's dashboard."
                )
            self._start_later(start.attempt, cause)
        else:
            self._ready.append(start.actor)

    def _start_later(self, failed: int, cause: FusedKVError) -> None:
        """Have a place tried again after a while; after so many attempts it stays empty, if there are others."""
        if failed < _ATTEMPTS:
            self.replaced += not isinstance(cause, StoreUnavailableError)
            _log.warning("An ingestion actor could not be started (attempt %d): %s", failed, cause)
            self._due.append((time.monotonic() + _AGAIN_AFTER_S * 2 ** (failed - 1), failed + 1))
            return
        self.given_up += 1
        if not (self._ready or self._starting or self._due):
            raise cause from None
        warnings.warn(
            f"An ingestion actor could not be started {_ATTEMPTS} times and is given up; the others go on. {cause}",
            FusedKVWarning,
            stacklevel=4,
        )

    def _cause(self, actor: Any, error: Any) -> FusedKVError:
        """Return why a task failed, if trying again may help, and replace its actor if it died; raise it otherwise."""
        if isinstance(error, self._ray.exceptions.RayTaskError):
            cause = _of(error)
            if not isinstance(cause, StoreUnavailableError) or isinstance(cause, StoreFullError):
                raise cause from None
            time.sleep(_AGAIN_AFTER_S)
            return cause
        if actor in self._ready:
            self._ready.remove(actor)
            # One that only cannot be reached would go on beside the other.
            self._ray.kill(actor)
            self.replaced += 1
            self._start()
        return IngestionFailedError(
            f"An ingestion actor died over a batch {_ATTEMPTS} times: {error}. What is stored stays; look for the "
            "reason, such as memory, in Ray's dashboard, and run it again."
        )

    def _wait(self, running: list[Any]) -> Any:
        """Return a reference that is done, of a task or of an actor's start; places that are due are tried again."""
        began_s, warned = time.monotonic(), False
        while True:
            now_s = time.monotonic()
            due = [attempt for at_s, attempt in self._due if at_s <= now_s]
            self._due = [later for later in self._due if later[0] > now_s]
            for attempt in due:
                self._start(attempt)
            wait_s = min([_WAIT_S, *(at_s - now_s for at_s, _ in self._due)])
            references = [*running, *self._starting]
            if not references:
                time.sleep(wait_s)
                continue
            done, _ = self._ray.wait(references, num_returns=1, timeout=wait_s)
            if done:
                return done[0]
            if not (warned or self._ready) and time.monotonic() - began_s >= _WAIT_S:
                warned = True
                warnings.warn(
                    f"No ingestion actor has started within {_WAIT_S:.0f} s: the Ray cluster has "
                    f"{self._ray.available_resources()} to give. It goes on waiting.",
                    FusedKVWarning,
                    stacklevel=4,
                )


def _of(error: Any) -> FusedKVError:
    """Return the error of this project that a task has raised, or one that says what it raised."""
    cause = error.cause
    if isinstance(cause, FusedKVError):
        return cause
    return IngestionFailedError(f"An ingestion actor failed: {error}")
