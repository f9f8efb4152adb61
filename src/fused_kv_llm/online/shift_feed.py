"""Loading context shifts layer by layer: from chunks' sidecars into the sink that adds them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

from torch import Tensor

from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.kv import ShiftSink
from fused_kv_llm.store import Sidecars, StoredSidecar

from .read_ahead import LayerReads, ReadAhead, layer_groups

__all__ = ["ShiftFeed"]


class ShiftFeed:
    """Adds every chunk's context shift to its stored KV, after that has been put in place.

    Sidecars are opened when the first layer is due, since a probe that sees only anchors needs none of them, or by
    :meth:`start`. They are read some layers at a time, a little ahead of the layer that is due.

    Parameters
    ----------
    sink : ShiftSink
        Where their layers go.
    sidecars : Sidecars
        The store's. A chunk without a context shift, stored without neighbours, stays as it is.
    name : str or None
        Name of the sidecars that are used; None uses none.
    num_layers : int
    first_layers : sequence of int
        Layers that are needed first.
    executor : Executor or None
        Threads that read; without them, the system is asked to read ahead.
    opened : mapping of str to StoredSidecar or None
        By chunk key, what was opened before; whoever opened it closes it.
    singly : bool
        Whether every layer is waited for, see :func:`.read_ahead.layer_groups`.

    Attributes
    ----------
    bytes_read : int
        Bytes of the sidecars read so far; what is read again, for a second use, counts again.
    bytes_loaded : int
        The same, with each layer counted once.
    read_s : float
        Seconds that the computation has waited for them, or read them itself.
    """

    def __init__(
        self,
        sink: ShiftSink,
        sidecars: Sidecars,
        name: str | None,
        num_layers: int,
        first_layers: Sequence[int],
        executor: Executor | None,
        opened: Mapping[str, StoredSidecar | None] | None = None,
        *,
        singly: bool = False,
    ) -> None:
        self._sink = sink
        self._sidecars = sidecars
        self._name = name
        self._num_layers = num_layers
        self._first_layers = first_layers
        self._executor = executor
        self._opened, self._singly = opened or {}, singly
        self._readers: dict[str, StoredSidecar] = {}
        self._ahead: ReadAhead[dict[str, Tensor]] | None = None
        self._filled: set[int] = set()
        self._groups_loaded: set[range] = set()
        self.bytes_read = self.bytes_loaded = 0
        self.read_s = 0.0

    def fill(self, layer_idx: int) -> None:
        """Shift one layer's chunk KV, which has just been put in place; only the first call does anything.

        Raises
        ------
        ChunkDamagedError
            If a sidecar turns out to be damaged.
        """
        if layer_idx not in self._filled:
            self._receive(layer_idx)
            self._sink.add(layer_idx)
            self._filled.add(layer_idx)

    def version(self, key: str) -> Hashable:
        """Return which of the shifts that a chunk has had is added; None if none is."""
        reader = self._readers.get(key)
        return None if reader is None else reader.version

    def read_all(self, key: str) -> dict[str, Tensor]:
        """Return a chunk's shift in all layers; raises as :meth:`fill`."""
        return self._readers[key].read(0, self._num_layers)

    def start(self) -> ReadAhead[dict[str, Tensor]]:
        """Open the sidecars, and begin to read the layers that are needed first."""
        if self._ahead is None:
            self._ahead = self._open()
            self._ahead.start()
        return self._ahead

    def close(self) -> None:
        """Wait for reads that have begun, and close the sidecars."""
        if self._ahead is not None:
            self._ahead.close()
        for key, reader in self._readers.items():
            if key not in self._opened:
                reader.close()

    def _receive(self, layer_idx: int) -> None:
        """Give the sink the layer's group, unless it has it."""
        ahead = self.start()
        group = ahead.group(layer_idx)
        if self._sink.layers == group:
            return
        started_s = time.perf_counter()
        reads = iter(ahead.take(layer_idx))
        parts = {
            key: reader.read(group.start, group.stop) if reader.in_memory else next(reads)
            for key, reader in self._readers.items()
        }
        self.read_s += time.perf_counter() - started_s
        nbytes = sum(tensor.nbytes for part in parts.values() for tensor in part.values())
        self.bytes_read += nbytes
        if group not in self._groups_loaded:
            self._groups_loaded.add(group)
            self.bytes_loaded += nbytes
        self._sink.receive(group, parts)

    def _open(self) -> ReadAhead[dict[str, Tensor]]:
        # Shifts that another engine made beside the same chunks are not this one's.
        name, keys = self._name or "", self._sink.keys if self._name else []
        lacking = [key for key in keys if key not in self._opened]
        opened = (self._executor.map if self._executor else map)(partial(self._sidecars.open, name=name), lacking)
        ours = {**self._opened, **dict(zip(lacking, opened, strict=True))}
        found = {key: reader for key in keys if (reader := ours[key]) is not None}
        self._readers = {key: reader for key, reader in found.items() if self._fits(key, reader)}
        on_disk = [reader for reader in self._readers.values() if not reader.in_memory]
        groups = layer_groups(self._num_layers, self._first_layers, resident=not on_disk, singly=self._singly)
        return ReadAhead(self._executor, groups, [LayerReads(reader.read, reader.announce) for reader in on_disk])

    def _fits(self, key: str, reader: StoredSidecar) -> bool:
        if reader.rows == self._num_layers:
            return True
        # It is whole, so it is of another model.
        if key not in self._opened:
            reader.close()
        warnings.warn(
            f"The context shift of chunk {key[:16]} does not have the model's {self._num_layers} layers. The chunk is "
            "used without it; ingest it again to replace it.",
            FusedKVWarning,
            stacklevel=2,
        )
        return False
