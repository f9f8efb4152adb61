"""Reads on the simulated clock: the library says which is next, a link says how long it takes."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import simpy

from fused_kv_llm.online import LayerRead, LoadAhead
from fused_kv_llm.serving.read_queue import ReadQueue

from .clock import Clock
from .hardware import Link

__all__ = ["ChunkPlace", "SimulatedLoader"]


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """A chunk that has to be read: what `LoadAhead` calls a place.

    Parameters
    ----------
    tier : str
    layer_bytes : float
    """

    tier: str
    layer_bytes: float

    def __call__(self, start: int, stop: int) -> None:
        """Read nothing: there are no bytes."""


class SimulatedLoader:
    """Takes the place of :class:`fused_kv_llm.serving.loader.Loader`.

    Parameters
    ----------
    clock : Clock
    links : dict of str to Link
        By tier.
    """

    def __init__(self, clock: Clock, links: dict[str, Link]) -> None:
        self._env = clock.env
        self._queue = ReadQueue(clock.world_s)
        self._links = links
        # Bytes of a link come one after another, whoever waits for them.
        self._wires = {tier: simpy.Resource(self._env, 1) for tier in links}
        self.bytes_read = dict.fromkeys(links, 0.0)

    def add(self, load: LoadAhead) -> None:
        """Have something loaded after what was added before."""
        self._queue.add(load)
        self.look()

    def look(self) -> None:
        """Put one more reader to work if there is something to read and too few do."""
        if self._queue.wants_reader():
            self._env.process(self._work())

    def _work(self) -> Generator[simpy.Event, None, None]:
        while (taken := self._queue.take()) is not None:
            self.look()
            load, job = taken
            began_s = self._env.now
            yield from self._read(job)
            load.came_back(job, self._env.now - began_s, 0.0)
            self._queue.came_back(job)

    def _read(self, job: LayerRead) -> Generator[simpy.Event, None, None]:
        place = job.load
        if not isinstance(place, ChunkPlace):
            raise TypeError(f"{place!r} is not a simulated chunk")
        link, nbytes = self._links[place.tier], place.layer_bytes * (job.stop - job.start)
        yield self._env.timeout(link.latency_s)
        with self._wires[place.tier].request() as wire:
            yield wire
            yield self._env.timeout(nbytes / link.bytes_per_s)
        self.bytes_read[place.tier] += nbytes
