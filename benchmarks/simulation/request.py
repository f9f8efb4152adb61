"""A request that is scheduled like a served one, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fused_kv_llm.online import LoadAhead, loading_depth, may_begin
from fused_kv_llm.serving import RequestState, Terms

from .costs import Work
from .trace import Asked

if TYPE_CHECKING:
    from .engine import SimulatedEngine

__all__ = ["Part", "SimulatedRequest"]


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of a request: its answer's next token, or a slice of its prompt."""

    work: Work
    answers: int


class SimulatedRequest:
    """Takes the place of :class:`fused_kv_llm.serving.ServedRequest`; the scheduler sees no difference.

    Parameters
    ----------
    engine : SimulatedEngine
    asked : Asked
    arrived_s : float
    """

    def __init__(self, engine: SimulatedEngine, asked: Asked, arrived_s: float) -> None:
        self.engine, self.home, self.asked, self.arrived_s = engine, engine.home, asked, arrived_s
        self.terms, self.provisional = Terms(), False
        # Nothing is tried again here: an error is a defect of the simulation.
        self.failures, self.report = 0, SimpleNamespace(retries=0)
        self.state = RequestState.WAITING
        self.deadline_s, self.asked_s = float("inf"), 0.0
        self.max_tokens, self.prompt_tokens, self.kv_nbytes = asked.answer_tokens, 0, 0
        self.chunk_keys = frozenset[str]()
        self.cached_ratio: float | None = None
        self.overtaken, self.is_stuck, self.wants_shared = 0, False, None
        self.may_pause = engine.costs.may_pause
        self.token_s: list[float] = []
        self.error: BaseException | None = None
        self.computed_tokens = 0.0
        self._is_read = False
        self.load: LoadAhead | None = None
        self._probe_s = 0.0
        # The slice under way: its work, and the seconds that are left of it.
        self._left = self._slice = Work(0.0, 0.0)
        self._slice_left_s = 0.0
        self._began_s = 0.0

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.state is RequestState.DONE

    def reading_s(self) -> float:
        """Return how long its prompt is read, the first time."""
        if self._is_read:
            return 0.0
        self._is_read = True
        costs = self.engine.costs
        return costs.read_s + costs.read_token_s * self.engine.trace.prompt_tokens(self.asked)

    @property
    def prompt_plan(self) -> SimulatedRequest:
        """What knows how far its prompt is loaded: the request itself."""
        return self

    def measure(self) -> None:
        """Find out how much of its prompt is cached."""
        total = self.engine.trace.prompt_tokens(self.asked)
        cached = self.engine.reuse.cached_tokens(self.asked)
        self.cached_ratio = cached / max(1.0, total - cached)

    def plan(self, loader: Any, on_change: Callable[[], None], *, ahead: bool) -> None:
        """Find its chunks, and begin to load them."""
        engine = self.engine
        self.prompt_tokens = engine.trace.prompt_tokens(self.asked)
        self.kv_nbytes = (self.prompt_tokens + self.max_tokens) * engine.shape.kv_bytes_per_token
        plan = engine.reuse.plan(self, self.asked)
        self._left, self.computed_tokens = plan.work, plan.work.rows
        self._probe_s = engine.costs.probing_s(plan.probed_tokens)
        if plan.places and loader is not None:
            order = range(engine.shape.num_layers)
            self.load = LoadAhead(order, plan.places, on_change, engine.clock.world_s)
            loader.add(self.load)

    @property
    def depth(self) -> int:
        """How many layers must be there before it begins alone."""
        num_layers, row_s = self.engine.shape.num_layers, self.home.context.row_s.value
        compute_s = float("inf") if row_s is None else row_s * self._left.rows / num_layers
        return 1 if self.load is None else loading_depth(num_layers, self.load.seconds_per_layer, compute_s)

    def may_begin(self, *, alone: bool) -> bool:
        """Whether enough of it has been loaded."""
        return may_begin(self.load, lambda: self.depth, alone=alone)

    def begin(self) -> None:
        """Begin to compute."""
        self.state = RequestState.FUSING
        self._began_s = self.engine.clock.now_s()
        self._slice_left_s, self._slice = self._probe_s, Work(0.0, 0.0)

    def select(self) -> None:
        """Compute the probe, where prompts are cut into slices."""
        self.engine.clock.spend(self._slice_left_s)
        self._slice_left_s = 0.0

    def advance(self, pause_at_s: float, max_rows: int | None) -> SimulatedRequest | None:
        """Compute its prompt alone until a moment, a layer at least; return itself when it is complete."""
        clock, layers = self.engine.clock, self.engine.shape.num_layers
        while True:
            if self._slice_left_s > 0:
                whole_s = self.engine.costs.prompt_s(self._slice) if self._slice.rows else self._probe_s
                slower = self.engine.costs.beside if self.engine.scheduler.is_decoding else 1.0
                layer_s = slower * whole_s / layers
                count = ceil((min(slower * self._slice_left_s, pause_at_s - clock.now_s()) - 1e-9) / layer_s)
                spent_s = min(slower * self._slice_left_s, max(1, count) * layer_s)
                clock.spend(spent_s)
                self._slice_left_s = max(0.0, self._slice_left_s - spent_s / slower)
                if self._slice_left_s > 1e-9:
                    return None
                self._slice_left_s = 0.0
                if self._slice.rows:
                    return self._slice_is_done()
                if clock.now_s() > pause_at_s:
                    return None
            self._slice = self._next(max_rows)
            self._slice_left_s = self.engine.costs.prompt_s(self._slice)

    def part(self, max_rows: int | None) -> Part:
        """Return what a step computes of it."""
        if self.state is RequestState.FUSING:
            self._slice = self._next(max_rows)
            return Part(self._slice, 0)
        return Part(Work(1.0, self.prompt_tokens + len(self.token_s)), 1)

    def computed(self, logits: None, seconds: float) -> None:
        """Note that its part was computed."""
        if self.state is not RequestState.FUSING:
            self._write()
        elif self._slice_is_done() is not None:
            self.take(self)

    def take(self, prompt: SimulatedRequest) -> None:
        """Send the first token of a complete prompt."""
        self.engine.clock.spend(self.engine.costs.first_s)
        self.state = RequestState.DECODING
        self.engine.reuse.complete(self, self.asked)
        self._write()

    def end(self, error: BaseException | None = None) -> None:
        """Give back what it holds."""
        if self.is_done:
            return
        self.state, self.error = RequestState.DONE, error
        if error is None:
            self.engine.reuse.end(self, self.asked)

    def _next(self, max_rows: int | None) -> Work:
        rows = self._left.rows
        return self._left if max_rows is None or rows <= max_rows else self._left.share(max_rows / rows)

    def _slice_is_done(self) -> SimulatedRequest | None:
        done, left = self._slice, self._left
        self._left = Work(left.rows - done.rows, left.pairs - done.pairs, left.placed - done.placed)
        self._slice = Work(0.0, 0.0)
        if self._left.rows > 1e-6:
            return None
        clock = self.engine.clock
        computed_s = clock.now_s() - self._began_s
        if self.load is not None and not self.load.is_over:
            # Alone, it began before all was there: the last layers are waited for.
            layers = self.engine.shape.num_layers - self.load.present
            clock.spend(max(0.0, layers * self.load.seconds_per_layer - computed_s))
        self.home.context.row_s.add(computed_s / max(1.0, self.computed_tokens))
        return self

    def _write(self) -> None:
        self.token_s.append(self.engine.clock.now_s())
        if len(self.token_s) >= self.max_tokens:
            self.end()
