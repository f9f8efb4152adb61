"""Reading a request's layers a little ahead of the passes that need them.

A chunk's KV and its context shift are needed together, layer by layer. Were everything queued at once, the shifts of
the first layers would wait behind the KV of the last ones; so both queue only some layers more than are being used.

Who reads depends on the processor. Threads of our own read beside a GPU's computation, and beside a CPU's where it
leaves cores free. Where it leaves none they would be in its way, by far more than the time they save (two cores, 3,400
tokens at ratio 0.15: from the system's cache, 4 threads made a request of 0.6 s one of 1.0 s): then the system is told
what will be needed, reads that from the disk meanwhile, and what it has read is copied when it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Generic, NamedTuple, TypeVar

import torch

from fused_kv_llm.store import CAN_ANNOUNCE
from fused_kv_llm.thread_pool import available_cores

__all__ = ["LayerReads", "ReadAhead", "layer_groups", "reader_threads"]

_LAYERS = 8
# Computing begins when these are there.
_FIRST_LAYERS = 4
_GROUPS_AHEAD = 1
_MOST_THREADS = 4

_Read = TypeVar("_Read")


def reader_threads(device: torch.device) -> int:
    """Return how many threads should read beside the computation; 0 if the computing thread should read as well."""
    if device.type != "cpu" or not CAN_ANNOUNCE:
        return _MOST_THREADS
    return min(_MOST_THREADS, max(0, available_cores() - torch.get_num_threads()))


def layer_groups(
    num_layers: int, first: Iterable[int] = (), resident: bool = False, *, singly: bool = False
) -> list[range]:
    """Return the runs of layers to read, in the order they are needed.

    Parameters
    ----------
    num_layers : int
    first : iterable of int
        Layers that a probe scores before anything else is needed.
    resident : bool
        Whether everything is in memory, so that all layers can be taken at once.
    singly : bool
        Whether every layer is waited for, so that none should wait for the next.

    Returns
    -------
    list of range
        Disjoint, covering all layers.
    """
    scored = sorted(set(first))
    remaining = [layer for layer in range(num_layers) if layer not in scored]
    groups: list[range] = []
    for run in (scored, remaining):
        for layer in run:
            room = 1 if singly else num_layers if resident else _LAYERS if len(groups) > 1 else _FIRST_LAYERS
            if groups and groups[-1].stop == layer and len(groups[-1]) < room and layer != run[0]:
                groups[-1] = range(groups[-1].start, layer + 1)
            else:
                groups.append(range(layer, layer + 1))
    return groups


class LayerReads(NamedTuple, Generic[_Read]):
    """One place to read from.

    Parameters
    ----------
    read : callable
        Reads layers ``start`` to ``stop - 1``.
    announce : callable
        Has the system read them ahead.
    """

    read: Callable[[int, int], _Read]
    announce: Callable[[int, int], object]


class ReadAhead(Generic[_Read]):
    """What one request reads of each group of layers; used by one thread.

    Parameters
    ----------
    executor : Executor or None
        Threads that read; without them, who takes layers reads them.
    groups : sequence of range
        All layers, in the order they are needed.
    places : sequence of LayerReads
        Where to read them from.
    """

    def __init__(self, executor: Executor | None, groups: Sequence[range], places: Sequence[LayerReads[_Read]]) -> None:
        self._executor = executor
        self._groups = list(groups)
        self._places = list(places)
        self._number_of = {layer: number for number, group in enumerate(groups) for layer in group}
        self._queued: dict[int, list[Future[_Read]]] = {}
        self._left: list[Future[_Read]] = []

    @property
    def layers(self) -> list[int]:
        """All layers, in the order they are needed."""
        return list(self._number_of)

    def group(self, layer_idx: int) -> range:
        """Return the layers that are read together with this one."""
        return self._groups[self._number_of[layer_idx]]

    def start(self) -> None:
        """Begin with the layers that are needed first."""
        self._queue(0)

    def is_read(self, layer_idx: int) -> bool:
        """Whether a layer can be taken without waiting for a thread."""
        queued = self._queued.get(self._number_of[layer_idx], [])
        return len(queued) == (len(self._places) if self._executor else 0) and all(read.done() for read in queued)

    def take(self, layer_idx: int) -> list[_Read]:
        """Return the reads of a layer's group from every place, waiting for them; go on with the next groups.

        Groups that are neither this one nor among the next are forgotten: who needs them again reads them again.

        Raises
        ------
        Exception
            What a read of this group has raised.
        """
        number = self._number_of[layer_idx]
        coming = range(number, number + 1 + _GROUPS_AHEAD)
        for other in self._queued.keys() - set(coming):
            self._forget(other)
        for other in coming:
            self._queue(other)
        if self._executor is None:
            group = self._groups[number]
            return [place.read(group.start, group.stop) for place in self._places]
        return [read.result() for read in self._queued[number]]

    def close(self) -> None:
        """Drop reads that have not begun and wait for those that have, so that files can be closed."""
        for number in list(self._queued):
            self._forget(number)
        for read in self._left:
            # Waits. An error does not matter any more: the result is not used.
            read.exception()
        self._left.clear()

    def _queue(self, number: int) -> None:
        if number >= len(self._groups) or number in self._queued:
            return
        start, stop = self._groups[number].start, self._groups[number].stop
        self._queued[number] = []
        for place in self._places:
            if self._executor is None:
                place.announce(start, stop)
            else:
                self._queued[number].append(self._executor.submit(place.read, start, stop))

    def _forget(self, number: int) -> None:
        self._left += [read for read in self._queued.pop(number) if not (read.cancel() or read.done())]
