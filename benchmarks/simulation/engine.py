"""The step loop on the simulated clock: arrivals, steps of the library's scheduler, ingestion of what was missed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import simpy
import torch

from fused_kv_llm.config import EngineConfig
from fused_kv_llm.online import MovingAverage
from fused_kv_llm.serving import Limits, limits_of
from fused_kv_llm.serving.ingestion_pieces import IngestionPieces, Piece
from fused_kv_llm.serving.scheduler import Scheduler

from .clock import Clock, SimulatedMeans
from .costs import Costs, Work
from .hardware import Hardware
from .reading import SimulatedLoader
from .request import SimulatedRequest
from .reuse import FullPrefill, FusedChunks, PrefixOnly, Reuse, work_of
from .shape import ModelShape
from .tiers import ChunkTiers
from .trace import Asked, Trace

__all__ = ["Setup", "SimulatedEngine", "limits"]

# What a step takes beside its passes; and so time always goes forward.
_STEP_S = 1e-4


def limits(**given: Any) -> Limits:
    """Return the library's limits of a simulated machine: nothing is tried again, and everybody may wait."""
    usual = limits_of(EngineConfig(), torch.device("cpu"))
    alone: dict[str, Any] = {"queued": 10**6, "retries": 0, "share_chunk_kv": "never", "prefix_bytes": 0}
    return replace(usual, **{**alone, **given})


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated.

    Parameters
    ----------
    shape : ModelShape
    hardware : Hardware
    costs : Costs
    limits : Limits
        ``prefix_bytes`` and ``prefix_host_bytes`` count with ``how="prefix"`` only.
    how : {"fused", "prefix", "full"}
    policy : str
        Of the store, or of the prefix tree.
    ratio : float
    is_filled : bool
        Whether all chunks are stored before the first question.
    """

    shape: ModelShape
    hardware: Hardware
    costs: Costs
    limits: Limits
    how: str = "fused"
    policy: str = "pgdsf"
    ratio: float = 0.15
    is_filled: bool = True


class SimulatedEngine:
    """Answers a trace.

    Parameters
    ----------
    setup : Setup
    trace : Trace
    warm_up : int
        Hits are counted from this question on.
    env : simpy.Environment or None
        Shared by several engines; None makes one.

    Attributes
    ----------
    tiers : ChunkTiers or None
        The store's, where chunk KV is reused.
    reuse : Reuse
    requests : list of SimulatedRequest
        In the order in which they came.
    """

    def __init__(self, setup: Setup, trace: Trace, warm_up: int = 0, env: simpy.Environment | None = None) -> None:
        self.setup, self.trace, self.shape, self.costs = setup, trace, setup.shape, setup.costs
        self.env = env or simpy.Environment()
        self.clock = Clock(self.env)
        hardware = setup.hardware
        links = {"disk": hardware.disk} | ({"remote": hardware.remote} if hardware.remote else {})
        self.loader = SimulatedLoader(self.clock, links)
        context = SimpleNamespace(pages=None, loaded=None, row_s=MovingAverage())
        self.home = SimpleNamespace(limits=setup.limits, tenant="", context=context)
        self.scheduler = Scheduler(
            nullcontext(),  # type: ignore[arg-type]
            self._post,
            self._ended,  # type: ignore[arg-type]
            lambda request: False,
            SimulatedMeans(self.clock, self.costs, self.loader),
        )
        self._pieces = IngestionPieces(self.clock.now_s)
        self.tiers: ChunkTiers | None = None
        self.reuse = self._reuse()
        self.requests: list[SimulatedRequest] = []
        self._inbox: deque[Callable[[], None]] = deque()
        self._news = self.env.event()
        self._done: dict[SimulatedRequest, simpy.Event] = {}
        self._warm_up = warm_up

    def open_loop(self) -> list[SimulatedRequest]:
        """Answer every question when it comes, and return the requests."""

        def arrivals() -> Generator[simpy.Event, None, None]:
            for asked in self.trace.asked:
                yield self.env.timeout(max(0.0, asked.at_s - self.env.now))
                self.submit(asked)

        return self._run([self.env.process(arrivals())])

    def closed_loop(self, users: int) -> list[SimulatedRequest]:
        """Have so many users ask one question after another, and return the requests."""
        left = iter(self.trace.asked)

        def user() -> Generator[simpy.Event, None, None]:
            for asked in left:
                yield self.submit(asked)

        return self._run([self.env.process(user()) for _ in range(users)])

    def start(self) -> None:
        """Begin the loop that answers; requests come by :meth:`submit`."""
        self.env.process(self._loop())

    def submit(self, asked: Asked) -> simpy.Event:
        """Take a question now, and return what happens when it has been answered."""
        if len(self.requests) == self._warm_up:
            self.count_anew()
        request = SimulatedRequest(self, asked, self.env.now)
        self.requests.append(request)
        self._done[request] = self.env.event()
        self._post(partial(self.scheduler.waiting.add, request))
        return self._done[request]

    def count_anew(self) -> None:
        """Forget the hits that were counted."""
        if self.tiers is not None:
            self.tiers.hits.clear()
        if isinstance(self.reuse, PrefixOnly):
            self.reuse.found_tokens = self.reuse.asked_tokens = 0.0

    def close(self) -> None:
        """Give temporary files back."""
        if self.tiers is not None:
            self.tiers.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _reuse(self) -> Reuse:
        setup, trace = self.setup, self.trace
        if setup.how == "full":
            return FullPrefill(trace)
        if setup.how == "prefix":
            limits = setup.limits
            return PrefixOnly(
                trace, setup.shape, limits.prefix_bytes, limits.prefix_host_bytes, setup.policy, setup.costs
            )
        unit = setup.costs.prompt_s(work_of(512, 0, 512)) / 512
        nbytes = [tokens * setup.shape.kv_bytes_per_token for tokens in trace.chunk_tokens]
        costs = [setup.costs.prompt_s(work_of(tokens, 0, tokens)) / unit for tokens in trace.chunk_tokens]
        self.tiers = ChunkTiers(nbytes, costs, setup.hardware, setup.policy, self.clock.world_s)
        if setup.is_filled:
            self.tiers.fill(range(len(nbytes)))
        return FusedChunks(trace, setup.shape, self.tiers, setup.ratio, self._store)

    def _run(self, callers: Sequence[simpy.Process]) -> list[SimulatedRequest]:
        self.start()
        self.env.run(self.env.all_of(callers))
        self.env.run(self.env.all_of([self._done[one] for one in self.requests]))
        return self.requests

    def _loop(self) -> Generator[simpy.Event, None, None]:
        while True:
            if not self.scheduler.has_work and not self._inbox:
                due_s = min(self.scheduler.patience_s(), self._piece_due_s())
                self._news = self.env.event()
                yield self._news if due_s == float("inf") else self._news | self.env.timeout(due_s)
            while self._inbox:
                self._inbox.popleft()()
            self.clock.spend(_STEP_S)
            self.scheduler.step()
            if self.scheduler.is_serving:
                self._pieces.requests_had(self.clock.ahead_s)
            if self._piece_due_s() <= 0:
                self._pieces.compute_next()
            yield self.clock.settle()

    def _piece_due_s(self) -> float:
        states = self.scheduler
        return self._pieces.due_s(fusing=states.is_fusing, loading=states.is_loading, decoding=states.is_decoding)

    def _post(self, message: Callable[[], None]) -> None:
        self._inbox.append(message)
        if not self._news.triggered:
            self._news.succeed()

    def _ended(self, request: SimulatedRequest) -> None:
        def tell(_: simpy.Event) -> None:
            if request.error is None:
                self._done[request].succeed()
            else:
                self._done[request].fail(request.error)

        # Its end is ahead of the others' time.
        later = self.env.timeout(self.clock.ahead_s)
        later.callbacks.append(tell)

    def _store(self, chunks: Sequence[int]) -> None:
        """Ingest chunks that were missed, beside requests."""
        for chunk in chunks:
            tokens = self.trace.chunk_tokens[chunk]
            self._pieces.add(Piece(partial(self._ingest, chunk, work_of(tokens, 0, tokens)), tokens))

    def _ingest(self, chunk: int, work: Work) -> Any:
        self.clock.spend(self.costs.prompt_s(work))
        if self.tiers is not None:
            self.tiers.put([chunk])
