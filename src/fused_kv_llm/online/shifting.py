"""Chunk KV shifted to its place: the first chunk of a prompt stays plain, later ones get what neighbours change."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import torch
from torch import Tensor

from fused_kv_kernels import ChunkShift, ShiftStack, TransferPlan, fit_shifts, rotation_tables
from fused_kv_llm.context_shift import CONTEXT_SHIFT, place_weight
from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.model import FusedCache, Geometry
from fused_kv_llm.store import Sidecars, StoredSidecar

from .read_ahead import LayerReads, ReadAhead, layer_groups
from .request import Placement

__all__ = ["ContextShift"]

_Side = dict[str, Tensor]


class ContextShift:
    """Adds every chunk's context shift to its stored KV, layer by layer, after the loader has put it in place.

    Sidecars are opened when the first layer is due, since a probe that sees only anchors needs none of them, or when
    asked to; they are read some layers at a time, a little ahead of the layer that is due.

    Parameters
    ----------
    placements : sequence of Placement
        The chunks, in prompt order.
    prefix_tokens : int
        Tokens of the header, which every chunk was prefilled after.
    cache : FusedCache
    geometry : Geometry
    sides : Sidecars
        Where the shifts are; a chunk without one, stored without neighbours, stays as it is.
    executor : Executor or None
        Threads that read; without them, the system is asked to read ahead.
    first_layers : sequence of int
        Layers that are needed first.

    Attributes
    ----------
    bytes_read : int
        Bytes of the sidecars read so far; what is read again, for a second use, counts again.
    bytes_loaded : int
        The same, with each layer counted once.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        prefix_tokens: int,
        cache: FusedCache,
        geometry: Geometry,
        sides: Sidecars,
        executor: Executor | None,
        first_layers: Sequence[int] = (),
    ) -> None:
        self._placements = placements
        self._prefix_tokens = prefix_tokens
        self._cache = cache
        self._geometry = geometry
        self._sides = sides
        self._executor = executor
        self._first_layers = first_layers
        self._readers: dict[str, StoredSidecar] = {}
        self._ahead: ReadAhead[_Side] | None = None
        self._stack: tuple[range, ShiftStack] | None = None
        self._groups_loaded: set[range] = set()
        self.bytes_read = self.bytes_loaded = 0

    def __call__(self, layer_idx: int) -> None:
        """Shift one layer's chunk KV, which has just been put in place.

        Raises
        ------
        ChunkDamagedError
            If a sidecar turns out to be damaged.
        """
        stack, at = self._stack_of(layer_idx)
        stack.add(at, self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0])

    def refine(
        self, layer_idx: int, plan: TransferPlan, damping_tokens: float, fresh_keys: Tensor, fresh_values: Tensor
    ) -> None:
        """Add one layer's shifts once more, as far as its recomputed rows show that they hold in this prompt.

        A chunk's weight says how far its shift holds on average. How far it holds here is fitted, for keys and for
        values, to the deviations of its recomputed tokens.

        Parameters
        ----------
        layer_idx : int
            Its chunks are shifted, and its fresh rows have not replaced the stored ones yet.
        plan : TransferPlan
            Says which the recomputed tokens are.
        damping_tokens : float
            Keeps chunks with few of them from trusting them.
        fresh_keys, fresh_values : Tensor
            ``[Hkv, R, D]``.

        Raises
        ------
        ChunkDamagedError
            If a sidecar turns out to be damaged.
        """
        stack, at = self._stack_of(layer_idx)
        layer = self._cache.keys[layer_idx, 0], self._cache.values[layer_idx, 0]
        weights = fit_shifts(plan, stack, at, damping_tokens, (fresh_keys, fresh_values), layer)
        stack.add(at, *layer, weights)

    def start(self) -> ReadAhead[_Side]:
        """Open the sidecars, and begin to read the layers that are needed first."""
        if self._ahead is None:
            self._ahead = self._open()
            self._ahead.start()
        return self._ahead

    def close(self) -> None:
        """Wait for reads that have begun, and close the sidecars."""
        if self._ahead is not None:
            self._ahead.close()
        for reader in self._readers.values():
            reader.close()

    def _stack_of(self, layer_idx: int) -> tuple[ShiftStack, int]:
        """Return the shifts of the layer's group, read if they are not at hand, and the layer's place in them."""
        ahead = self.start()
        group = ahead.group(layer_idx)
        if self._stack is None or self._stack[0] != group:
            self._stack = group, self._read(ahead, layer_idx)
        return self._stack[1], layer_idx - group.start

    def _open(self) -> ReadAhead[_Side]:
        keys = dict.fromkeys(placement.stored.key for placement in self._placements if self._weight(placement) > 0)
        opened = (self._executor.map if self._executor else map)(partial(self._sides.open, name=CONTEXT_SHIFT), keys)
        found = {key: reader for key, reader in zip(keys, opened, strict=True) if reader is not None}
        self._readers = {key: reader for key, reader in found.items() if self._fits(key, reader)}
        on_disk = [reader for reader in self._readers.values() if not reader.in_memory]
        groups = layer_groups(self._geometry.num_layers, self._first_layers, at_hand=not on_disk)
        return ReadAhead(self._executor, groups, [LayerReads(reader.read, reader.announce) for reader in on_disk])

    def _fits(self, key: str, reader: StoredSidecar) -> bool:
        if reader.rows == self._geometry.num_layers:
            return True
        # Whole, and of another model: it comes from elsewhere.
        reader.close()
        warnings.warn(
            f"The context shift of chunk {key[:16]} has not the model's {self._geometry.num_layers} layers and is done "
            "without.",
            FusedKVWarning,
            stacklevel=2,
        )
        return False

    def _weight(self, placement: Placement) -> float:
        return place_weight(placement.segment.start - self._prefix_tokens, placement.stored.num_tokens)

    def _read(self, ahead: ReadAhead[_Side], layer_idx: int) -> ShiftStack:
        """Return the shifts of the layer's group."""
        group, read = ahead.group(layer_idx), iter(ahead.take(layer_idx))
        parts = {
            key: reader.read(group.start, group.stop) if reader.in_memory else next(read)
            for key, reader in self._readers.items()
        }
        nbytes = sum(tensor.nbytes for side in parts.values() for tensor in side.values())
        self.bytes_read += nbytes
        if group not in self._groups_loaded:
            self._groups_loaded.add(group)
            self.bytes_loaded += nbytes
        shifts, deltas = [], []
        for placement in self._placements:
            side, weight = parts.get(placement.stored.key), self._weight(placement)
            if weight > 0 and side is not None:
                shifts.append(_shift(placement, side, weight))
                deltas.append(placement.delta)
        cos, sin = rotation_tables(torch.tensor(deltas, dtype=torch.int64), self._geometry.inv_freq)
        device = self._cache.keys.device
        return ShiftStack(shifts, cos.to(device), sin.to(device))


def _shift(placement: Placement, side: dict[str, Tensor], weight: float) -> ChunkShift:
    segment = placement.segment
    inside = slice(segment.chunk_start, segment.chunk_start + placement.num_tokens)
    keys, values = ((side[name], side[f"{name}_scale"]) for name in ("keys", "values"))
    return ChunkShift(segment.start, inside, weight, keys, values)
