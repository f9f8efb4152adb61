"""What the scheduler works with: a clock, the model, threads that help. A simulation has means of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fused_kv_llm.model import LoadedModel, RaggedPart, forward_ragged

from .crowding import CrowdedCores
from .helper_threads import HelperThreads
from .loader import Loader

__all__ = ["MOST_PLANNED", "Means", "RealMeans"]

MOST_PLANNED = 16
"""Requests that are opened and loaded ahead at most, those whose disk does not answer among them."""


class Means(Protocol):
    """What the scheduler decides about but does not do itself.

    Attributes
    ----------
    loader : Loader
        Given to requests that load ahead.
    """

    loader: Any

    def now_s(self) -> float:
        """Return the time, in seconds of any beginning."""

    def plan(self, work: Callable[..., None], *args: Any) -> None:
        """Have something called by a thread that plans."""

    def replace_planner(self) -> None:
        """Let one more thread plan, in place of one that has not come back."""

    def planner_came_back(self) -> None:
        """Let one thread fewer plan again."""

    def forward(self, loaded: LoadedModel, parts: Sequence[RaggedPart]) -> list[Tensor]:
        """Compute one pass for several requests, see :func:`fused_kv_llm.model.forward_ragged`."""

    def look(self) -> None:
        """Look who else uses the cores; called once a step."""

    def rest(self) -> None:
        """End the threads that help; they start again when they are needed."""


class RealMeans:
    """The machine itself.

    Attributes
    ----------
    loader : Loader
    cores : CrowdedCores
    """

    def __init__(self) -> None:
        self.loader, self.cores = Loader(), CrowdedCores()
        self._planners = HelperThreads(MOST_PLANNED, "fused-kv-plan")

    def now_s(self) -> float:
        """Return ``time.perf_counter()``."""
        return time.perf_counter()

    def plan(self, work: Callable[..., None], *args: Any) -> None:
        """Have a thread call it."""
        self._planners.submit(work, *args)

    def replace_planner(self) -> None:
        """Let there be one more."""
        self._planners.give_up_one()

    def planner_came_back(self) -> None:
        """Let there be one fewer."""
        self._planners.came_back()

    def forward(self, loaded: LoadedModel, parts: Sequence[RaggedPart]) -> list[Tensor]:
        """Compute it."""
        return forward_ragged(loaded, parts)

    def look(self) -> None:
        """Let OpenMP's workers wait as others use the cores."""
        self.cores.look()

    def rest(self) -> None:
        """End the threads."""
        self._planners.close()
        self.loader.close()
        self.cores.end()
