"""The cache seam: transformers caches that hold a request's KV, or collect a batch's."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fused_kv_llm.model.cache_pool import CachePool
from fused_kv_llm.model.forward_pass import ForwardPass
from fused_kv_llm.model.geometry import Geometry, KVShape
from fused_kv_llm.model.pass_context import LayerPass, required_pass

__all__ = ["BatchCache", "FusedCache", "PassLayer"]


class PassLayer(CacheLayerMixin):
    """One layer of a cache in a pass of the engine, which says where keys and values go; it has no length of its own.

    Parameters
    ----------
    layer_idx : int
    """

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: whoever holds the keys and values made room for them."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length a mask would need; the engine's passes use none."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: nothing stands before what is given."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: it may have any length."""
        return -1


class _FusedLayer(PassLayer):
    """One layer of a :class:`FusedCache`: views into the request's buffers."""

    def __init__(self, cache: FusedCache, layer_idx: int, swaps: bool) -> None:
        super().__init__(layer_idx)
        self.cache = cache
        self.swaps = swaps
        shape = cache.geometry.shapes[layer_idx]
        self.keys = shape.of_keys(cache.keys[layer_idx])
        self.values = shape.of_values(cache.values[layer_idx])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Have the stored KV in place, write the fresh rows, and return what attention sees, ``[1, Hkv, N, D]``."""
        forward_pass = required_pass(ForwardPass)
        forward_pass.enter_layer(self.layer_idx)
        return forward_pass.given(self.write(forward_pass, key_states, value_states))

    def write(self, forward_pass: ForwardPass, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Do what :meth:`update` does for the rows of a pass."""
        if self.swaps:
            key_states, value_states = value_states, key_states
        for filler in forward_pass.fillers:
            filler.fill(self.layer_idx)
        written = forward_pass.watch(self.layer_idx, key_states, value_states)
        rows = forward_pass.rows
        if written is not None:
            rows, key_states, value_states = rows[written], key_states[:, :, written], value_states[:, :, written]
        if forward_pass.kv_dtype is not None:
            key_states, value_states = key_states.to(forward_pass.kv_dtype), value_states.to(forward_pass.kv_dtype)
        self.keys.index_copy_(2, rows, key_states)
        self.values.index_copy_(2, rows, value_states)
        seen = forward_pass.seen(self.keys), forward_pass.seen(self.values)
        return seen[::-1] if self.swaps else seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length a mask would need; fused passes use none."""
        return self.cache.length, 0

    def get_seq_length(self) -> int:
        """Return the tokens whose KV is in place."""
        return self.cache.length

    def get_max_length(self) -> int:
        """Return the capacity."""
        return int(self.cache.keys.shape[3])


class FusedCache(Cache):
    """Keys and values of one request; the pass that is being run says what happens to them.

    Parameters
    ----------
    geometry : Geometry
        The model's shapes.
    capacity : int
        Tokens of the prompt plus tokens to generate.
    pool : CachePool
        Where its memory comes from.
    tightly : bool
        Whether a buffer that is much larger is not taken, see :meth:`.CachePool.take`.

    Attributes
    ----------
    keys, values : Tensor
        ``[L, 1, Hkv, capacity, D]`` and ``[L, 1, Hkv, capacity, Dv]`` in the geometry's room; the keys are what
        carries the rotation.
    layers : list
        Their ``keys`` and ``values`` are those of one layer, without padding.
    length : int
        Tokens in place: the prompt's, then one more with each generated token.
    """

    def __init__(self, geometry: Geometry, capacity: int, pool: CachePool, *, tightly: bool = False) -> None:
        self._room = geometry.room
        heads, *dims = self._room
        shapes = [(geometry.num_layers, 1, heads, capacity, dim) for dim in dims]
        of_keys, of_values = map(math.prod, shapes)
        self.geometry = geometry
        self._pool = pool
        self._buffer: Tensor | None = pool.take(of_keys + of_values, tightly=tightly)
        self.keys = self._buffer[:of_keys].view(shapes[0])
        self.values = self._buffer[of_keys : of_keys + of_values].view(shapes[1])
        self.length = 0
        super().__init__(layers=[_FusedLayer(self, idx, geometry.swaps) for idx in range(geometry.num_layers)])

    def own_rows(self, positions: Tensor) -> Tensor:
        """Return where tokens stand in the buffers, int64; here that is where they stand in the request."""
        return positions

    def padded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys ``[..., Hkv, R, D]`` and values ``[..., Hkv, R, Dv]`` as they stand in the buffers."""
        return self._room.pad_keys(keys), self._room.pad_values(values)

    def release(self) -> None:
        """Give the memory back; the cache must not be used afterwards. Calling it again does nothing."""
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            # Not a view, which would keep the memory as long as the cache, whose layers refer to it.
            self.keys = self.values = buffer.new_empty(0)
            for layer in self.layers:
                layer.keys = layer.values = self.keys
            self._pool.give_back(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self.keys.nbytes + self.values.nbytes


class _BatchLayer(PassLayer):
    """One layer of a :class:`BatchCache`; its keys are None where the layer has none of its own."""

    def __init__(self, layer_idx: int, swaps: bool) -> None:
        super().__init__(layer_idx)
        self.swaps = swaps

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep a batch's KV ``[B, Hkv, T, D]`` and return it."""
        forward_pass = required_pass(LayerPass)
        forward_pass.enter_layer(self.layer_idx)
        fresh = key_states, value_states
        self.keys, self.values = fresh[::-1] if self.swaps else fresh
        return forward_pass.given(fresh)


class BatchCache(Cache):
    """Collects the KV of a batch, or of chunks that stand one after another in one row.

    Parameters
    ----------
    num_layers : int
    room : KVShape or None
        In which KV is kept (:class:`.Geometry`); None for layers that all have the same shape.
    swaps : bool
        Whether the model gives its cache what carries the rotation as values (:class:`.Geometry`).
    """

    def __init__(self, num_layers: int, room: KVShape | None = None, *, swaps: bool = False) -> None:
        super().__init__(layers=[_BatchLayer(idx, swaps) for idx in range(num_layers)])
        self.room = room

    def chunk(self, row: int, tokens: slice) -> tuple[Tensor, Tensor]:
        """Return one chunk's keys ``[L, Hkv, T, D]`` and values ``[L, Hkv, T, Dv]``, copied and padded."""
        room = self.room or KVShape(0, 0, 0)
        keys = torch.stack([room.pad_keys(layer.keys[row, :, tokens]) for layer in self.layers])
        values = torch.stack([room.pad_values(layer.values[row, :, tokens]) for layer in self.layers])
        return keys, values
