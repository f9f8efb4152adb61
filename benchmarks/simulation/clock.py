"""The simulated clock, and the means by which the scheduler works on it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from .costs import Costs

__all__ = ["Clock", "SimulatedMeans"]


class Clock:
    """A step of the scheduler is one call, so what it takes is summed up and waited for after it.

    Meanwhile the loop's thread looks at nobody, as in the library: others leave messages, which it takes between two
    steps.

    Parameters
    ----------
    env : simpy.Environment
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.ahead_s = 0.0

    def now_s(self) -> float:
        """Return the time of the thread that computes."""
        return float(self.env.now) + self.ahead_s

    def world_s(self) -> float:
        """Return the time of everybody else."""
        return float(self.env.now)

    def spend(self, seconds: float) -> None:
        """Let the thread that computes be busy for so long."""
        if seconds < 0:
            raise ValueError(f"{seconds} s cannot be spent: time goes forward")
        self.ahead_s += seconds

    def settle(self) -> simpy.Event:
        """Return what is to be waited for after a step."""
        seconds, self.ahead_s = self.ahead_s, 0.0
        return self.env.timeout(seconds)


class SimulatedMeans:
    """Takes the place of :class:`fused_kv_llm.serving.means.RealMeans`.

    Parameters
    ----------
    clock : Clock
    costs : Costs
    loader : object
        Loads ahead, see :class:`.reading.SimulatedLoader`.

    Attributes
    ----------
    passes : int
        So many were computed.
    """

    def __init__(self, clock: Clock, costs: Costs, loader: Any) -> None:
        self.loader = loader
        self._clock, self._costs = clock, costs
        self.now_s = clock.now_s
        self.passes = 0

    def plan(self, work: Callable[..., None], request: Any, *args: Any) -> None:
        """Have it called when the request's prompt has been read."""
        self._clock.env.process(self._plan(work, request, *args))

    def _plan(self, work: Callable[..., None], request: Any, *args: Any) -> Generator[simpy.Event, None, None]:
        yield self._clock.env.timeout(request.reading_s())
        work(request, *args)

    def forward(self, loaded: Any, parts: Sequence[Any]) -> list[None]:
        """Let it take its time."""
        answers = [part for part in parts if part.answers]
        slices = [part.work for part in parts if not part.answers]
        keys = sum(part.work.pairs for part in answers)
        self._clock.spend(self._costs.together_s(len(answers), keys, slices[0] if slices else None))
        self.passes += 1
        return [None for _ in parts]

    def replace_planner(self) -> None:
        """Do nothing: whoever plans comes back."""

    def planner_came_back(self) -> None:
        """Do nothing."""

    def look(self) -> None:
        """Do nothing: nobody else uses the cores."""

    def rest(self) -> None:
        """Do nothing: there are no threads."""
