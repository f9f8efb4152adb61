"""One request's layers on their way from the disk into memory, in the order in which its passes need them.

Threads take reads from here one by one (:mod:`fused_kv_llm.serving.loader`). What they read stays with the open files,
where the request finds it. A request that is given up lets its files go when the last read has come back, however long
that takes, and nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["STUCK_S", "LayerRead", "LoadAhead"]

# A read that takes longer is of a disk, or another machine, that does not answer.
STUCK_S = 1.0

# So much is read between two looks at how far it is: one layer where they are slow, several where they are fast.
_RUN_S = 0.01
_MOST_LAYERS = 8
# Readers that only compute (copy, decipher, hash) would take cores from the model: one is enough then.
_BUSY_SHARE = 0.5
_READS_AT_ONCE = 4


@dataclass(slots=True, eq=False)
class _Run:
    """Neighbouring layers that are read together, at some positions of the order."""

    begin: int
    end: int
    next_place: int = 0
    done: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LayerRead:
    """One read: some layers of one place.

    Parameters
    ----------
    load : callable
        Brings layers ``start`` to ``stop - 1`` into memory.
    start, stop : int
        The layers.
    run : _Run
        What it is a part of.
    """

    load: Callable[[int, int], None]
    start: int
    stop: int
    run: _Run


class LoadAhead:
    """What has to be read for one request, and how far it is; thread-safe.

    Parameters
    ----------
    order : sequence of int
        All layers, in the order in which they are needed.
    places : sequence of callable
        Bring layers ``start`` to ``stop - 1`` of a chunk, or of a sidecar, into memory. Not empty.
    on_change : callable
        Called by the reading thread when there are more layers, or reading has failed.
    clock : callable
        Seconds of any beginning.

    Attributes
    ----------
    present : int
        How many layers are in memory, the first ones of the order.
    error : BaseException or None
        What a read has raised; nothing is read after that.
    begun_s, ended_s : float
        By the clock: the beginning, and when all layers were there or reading failed; 0 before.
    """

    def __init__(
        self,
        order: Sequence[int],
        places: Sequence[Callable[[int, int], None]],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.present = 0
        self.error: BaseException | None = None
        self._clock = clock
        self.begun_s, self.ended_s = clock(), 0.0
        self._order, self._places, self._on_change = list(order), list(places), on_change
        self._lock = threading.Lock()
        self._runs: deque[_Run] = deque()
        self._queued = 0
        self._in_flight = self._reads = 0
        self._under_way: set[LayerRead] = set()
        self._changed_s = self._since_s = self._active_s = self._read_s = self._busy_s = 0.0
        self._ended: Callable[[], None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all layers are in memory."""
        return self.present == len(self._order)

    @property
    def is_over(self) -> bool:
        """Whether nothing is read any more, but for what has begun."""
        return self.is_complete or self.error is not None or self._ended is not None

    @property
    def is_busy(self) -> bool:
        """Whether reading takes the processor's time more than it waits for a disk."""
        return self._busy_s > _BUSY_SHARE * self._read_s

    @property
    def is_stuck(self) -> bool:
        """Whether reads are under way of which none has come back for a while."""
        return self._in_flight > 0 and self._clock() - self._changed_s > STUCK_S

    @property
    def is_idle(self) -> bool:
        """Whether something is left to read and nobody is at it."""
        return not self.is_over and self._in_flight == 0

    @property
    def stalled_s(self) -> float:
        """For how many seconds reads have been under way of which none has come back; 0 if there are none."""
        return self._clock() - self._changed_s if self._in_flight > 0 else 0.0

    @property
    def hanging(self) -> list[Callable[[int, int], None]]:
        """The places of which reads are under way."""
        with self._lock:
            return [job.load for job in self._under_way]

    @property
    def seconds_per_layer(self) -> float:
        """Seconds of reading for one layer of all places, so far; 0 before anything was read."""
        with self._lock:
            now_s = self._clock()
            active_s = self._active_s + (now_s - self._since_s if self._in_flight else 0.0)
            reads = self._reads
        return active_s * len(self._places) / reads if reads else 0.0

    def take(self) -> LayerRead | None:
        """Return what is to be read next, to be given to :meth:`read`; None if there is nothing to do now."""
        with self._lock:
            # Nobody knows before the first read whether more threads would help.
            at_once = 1 if not self._reads or self.is_busy else _READS_AT_ONCE
            if self.is_over or self._in_flight >= at_once:
                return None
            run = self._runs[-1] if self._runs else None
            if run is None or run.next_place == len(self._places):
                if self._queued == len(self._order):
                    return None
                run = self._next_run()
            place = self._places[run.next_place]
            run.next_place += 1
            self._changed_s = self._clock()
            if not self._in_flight:
                self._since_s = self._changed_s
            self._in_flight += 1
            job = LayerRead(place, self._order[run.begin], self._order[run.end - 1] + 1, run)
            self._under_way.add(job)
        return job

    def read(self, job: LayerRead) -> None:
        """Read something that was taken; errors are kept for the request."""
        started_s, busy_s = self._clock(), time.thread_time()
        error: BaseException | None = None
        try:
            job.load(job.start, job.stop)
        except BaseException as found:
            error = found
        self.came_back(job, self._clock() - started_s, time.thread_time() - busy_s, error)

    def came_back(self, job: LayerRead, seconds: float, busy_s: float, error: BaseException | None = None) -> None:
        """Note how a read that was taken has ended.

        Parameters
        ----------
        job : LayerRead
        seconds, busy_s : float
            What it took, and how much of that was the processor's time.
        error : BaseException or None
            What it has raised.
        """
        with self._lock:
            before = self.present
            self._under_way.discard(job)
            self._read_s += seconds
            self._busy_s += busy_s
            self._in_flight -= 1
            self._changed_s = self._clock()
            if not self._in_flight:
                self._active_s += self._changed_s - self._since_s
            if error is None:
                self._count(job.run)
            else:
                self.error = self.error or error
            if self.is_complete or self.error is not None:
                self.ended_s = self.ended_s or self._clock()
            changed = self.present > before or error is not None
            last = self._ended if not self._in_flight else None
        if last is not None:
            last()
        elif changed:
            self._on_change()

    def end(self, close: Callable[[], None]) -> None:
        """Read nothing more; have the files closed, at once or by whoever comes back from the last read.

        Parameters
        ----------
        close : callable
            Called once, the first time only.
        """
        with self._lock:
            if self._ended is not None:
                return
            self._ended = close
            idle = not self._in_flight
        if idle:
            close()

    def _next_run(self) -> _Run:
        per_layer_s = self._read_s * len(self._places) / self._reads if self._reads else _RUN_S
        most = max(1, min(_MOST_LAYERS, int(_RUN_S / max(per_layer_s, 1e-9))))
        end = self._queued + 1
        while end < len(self._order) and end - self._queued < most and self._order[end] == self._order[end - 1] + 1:
            end += 1
        run = _Run(self._queued, end)
        self._queued = end
        self._runs.append(run)
        return run

    def _count(self, run: _Run) -> None:
        run.done += 1
        self._reads += run.end - run.begin
        while self._runs and self._runs[0].done == len(self._places):
            self.present = self._runs.popleft().end
