"""The cache seam: a transformers cache whose layers take fresh rows at any position.

``update()`` first lets the request's chunk KV arrive (:class:`LayerFiller`), then scatters the fresh rows into
their positions and returns the fused keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fused_kv_llm.model.buffers import BufferPool
from fused_kv_llm.model.geometry import Geometry

__all__ = ["BatchCache", "FusedCache", "LayerFiller", "RowWatcher"]

LayerFiller = Callable[[int], None]
RowWatcher = Callable[[int, Tensor, Tensor], Tensor | None]
"""Told a layer and its fresh rows ``[1, Hkv, R, D]`` before they are written; returns int64 indices of the rows to
write, or None for all."""


class _FusedLayer(CacheLayerMixin):
    """One layer of a :class:`FusedCache`: views into the request's buffers."""

    def __init__(self, cache: FusedCache, layer_idx: int) -> None:
        super().__init__()
        self.cache = cache
        self.layer_idx = layer_idx
        self.keys = cache.keys[layer_idx]
        self.values = cache.values[layer_idx]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers exist from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Scatter fresh rows and return what the pass may see, ``[1, Hkv, N, D]``."""
        cache = self.cache
        if cache.fill_on_update:
            cache.fill(self.layer_idx)
        cache.scatter(self.layer_idx, key_states, value_states)
        visible = cache.visible
        if isinstance(visible, int):
            return cache.keys[self.layer_idx, :, :, :visible], cache.values[self.layer_idx, :, :, :visible]
        return cache.gather(cache.keys[self.layer_idx], visible), cache.gather(cache.values[self.layer_idx], visible)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length a mask would need; fused passes use none."""
        return self.cache.length, 0

    def get_seq_length(self) -> int:
        """Return the tokens whose KV is in place."""
        return self.cache.length

    def get_max_length(self) -> int:
        """Return the capacity."""
        return int(self.cache.keys.shape[3])

    def get_max_cache_shape(self) -> int:
        """Return the same; the name that transformers has for it before 5.13."""
        return self.get_max_length()


class FusedCache(Cache):
    """Keys and values of one request.

    Parameters
    ----------
    geometry : Geometry
        The model's shapes.
    capacity : int
        Tokens of the prompt plus tokens to generate.
    pool : BufferPool
        Where its memory comes from.

    Attributes
    ----------
    keys, values : Tensor
        ``[L, 1, Hkv, capacity, D]``.
    length : int
        Tokens in place: the prompt's, then one more with each generated token.
    rows : Tensor
        int64 positions the current pass computes.
    visible : int or Tensor
        What attention sees: the first `visible` positions, or the positions listed.
    filler : callable or None
        Called once with each layer's index before the layer is first used.
    fill_on_update : bool
        Off while a probe runs that does not attend to the chunks: it fills the layers it scores itself.
    watcher : callable or None
        Sees the fresh rows of a layer beside the stored ones, and decides which of them replace those.
    """

    def __init__(self, geometry: Geometry, capacity: int, pool: BufferPool) -> None:
        shape = (2, geometry.num_layers, 1, geometry.num_kv_heads, capacity, geometry.head_dim)
        self._pool = pool
        self._buffer: Tensor | None = pool.take(math.prod(shape))
        self.keys: Tensor
        self.values: Tensor
        self.keys, self.values = self._buffer[: math.prod(shape)].view(shape)
        self.length = 0
        self.rows = torch.empty(0, dtype=torch.int64, device=self._buffer.device)
        self.visible: int | Tensor = 0
        self.filler: LayerFiller | None = None
        self.fill_on_update = True
        self.watcher: RowWatcher | None = None
        self._filled: set[int] = set()
        self._gathered: tuple[Tensor, Tensor] | None = None
        super().__init__(layers=[_FusedLayer(self, idx) for idx in range(geometry.num_layers)])

    def fill(self, layer_idx: int) -> None:
        """Wait for the chunk KV of a layer and put it in place; only the first call does anything."""
        if self.filler is not None and layer_idx not in self._filled:
            self.filler(layer_idx)
            self._filled.add(layer_idx)

    def refill(self, layers: Iterable[int]) -> None:
        """Forget that these layers were filled: the next pass puts the stored chunk KV into them again."""
        self._filled.difference_update(layers)

    def scatter(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Write fresh rows ``[1, Hkv, R, D]`` to the positions of the current pass."""
        written = None if self.watcher is None else self.watcher(layer_idx, keys, values)
        rows = self.rows
        if written is not None:
            rows, keys, values = rows[written], keys[:, :, written], values[:, :, written]
        self.keys[layer_idx].index_copy_(2, rows, keys)
        self.values[layer_idx].index_copy_(2, rows, values)

    def gather(self, part: Tensor, positions: Tensor) -> Tensor:
        """Return the rows ``[1, Hkv, len(positions), D]`` of a layer's keys or values at some positions.

        Whole rows of a matrix are picked two to three times faster on CPUs than positions within each head.
        """
        _, heads, capacity, dim = part.shape
        if self._gathered is None or self._gathered[0] is not positions:
            first = torch.arange(heads, device=positions.device)[:, None] * capacity
            self._gathered = positions, (first + positions).flatten()
        rows = part.view(heads * capacity, dim).index_select(0, self._gathered[1])
        return rows.view(1, heads, positions.shape[0], dim)

    def release(self) -> None:
        """Give the memory back; the cache must not be used afterwards. Calling it again does nothing."""
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            self.keys = self.values = buffer[:0]
            for layer in self.layers:
                layer.keys = layer.values = self.keys
            self._pool.give_back(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self.keys.nbytes + self.values.nbytes


class _BatchLayer(CacheLayerMixin):
    """One layer of a :class:`BatchCache`."""

    def __init__(self, prefix_keys: Tensor, prefix_values: Tensor) -> None:
        super().__init__()
        self.prefix = (prefix_keys, prefix_values)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the chunk's own KV is kept as it comes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keep a batch's KV ``[B, Hkv, T, D]`` and return it behind the prefix."""
        self.keys, self.values = key_states, value_states
        batch = key_states.shape[0]
        before_k, before_v = (part.expand(batch, -1, -1, -1) for part in self.prefix)
        return torch.cat((before_k, key_states), dim=2), torch.cat((before_v, value_states), dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length a mask would need; fused passes use none."""
        return int(self.prefix[0].shape[2]) + query_length, 0

    def get_seq_length(self) -> int:
        """Return the length of the prefix."""
        return int(self.prefix[0].shape[2])

    def get_max_length(self) -> int:
        """Return -1: a batch may have any length."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return the same; the name that transformers has for it before 5.13."""
        return self.get_max_length()


class BatchCache(Cache):
    """Collects the KV of a right-padded batch of chunks that share one prefix.

    Parameters
    ----------
    prefix_keys, prefix_values : Tensor
        ``[L, Hkv, P, D]``; ``P`` may be zero.
    """

    def __init__(self, prefix_keys: Tensor, prefix_values: Tensor) -> None:
        super().__init__(
            layers=[_BatchLayer(k[None], v[None]) for k, v in zip(prefix_keys, prefix_values, strict=True)]
        )

    def chunk(self, row: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return one chunk's keys and values ``[L, Hkv, num_tokens, D]``, copied."""
        keys = torch.stack([layer.keys[row, :, :num_tokens] for layer in self.layers])
        values = torch.stack([layer.values[row, :, :num_tokens] for layer in self.layers])
        return keys, values
