"""The KV of a request that shares the pages of its chunks: views of them, and a small cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fused_kv_kernels import ChunkView, LayerRotations, SequenceView
from fused_kv_llm.errors import FusedKVError
from fused_kv_llm.model.cache import FusedCache, PassLayer
from fused_kv_llm.model.cache_pool import CachePool
from fused_kv_llm.model.geometry import Geometry

__all__ = ["ViewCache"]


class _ViewLayer(PassLayer):
    """One layer of a :class:`ViewCache`: its own rows, which only steps that decode write to."""

    def __init__(self, cache: ViewCache, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.cache = cache
        self.keys, self.values = cache.keys[layer_idx], cache.values[layer_idx]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Refuse: attention to these rows alone would leave the chunks out."""
        raise FusedKVError("KV that shares the pages of its chunks decodes in steps of the engine only.")

    def get_max_length(self) -> int:
        """Return the capacity, tokens that chunks show included."""
        return self.cache.shown_tokens + int(self.cache.keys.shape[3])


class ViewCache(FusedCache):
    """Views of chunks' pages, and rows of the request's own: what no chunk shows, then its answer.

    Parameters
    ----------
    geometry : Geometry
        Of layers that :func:`fused_kv_kernels.decode_views` takes.
    capacity : int
        Tokens of the prompt plus tokens to generate.
    pool : CachePool
        Where the memory of its own rows comes from.
    chunks : sequence of ChunkView
    shown_tokens : int
        Tokens of the prompt that they show.
    rotations : LayerRotations
        The model's.
    pages : sequence of object
        What the chunks are of; kept alive as long as the cache holds its memory.

    Attributes
    ----------
    view : SequenceView
        What the request attends to.
    length : int
        As for :class:`.FusedCache`: tokens in place, those of the chunks included.
    """

    def __init__(
        self,
        geometry: Geometry,
        capacity: int,
        pool: CachePool,
        chunks: Sequence[ChunkView],
        shown_tokens: int,
        rotations: LayerRotations,
        pages: Sequence[object] = (),
    ) -> None:
        self.shown_tokens = shown_tokens
        super().__init__(geometry, capacity - shown_tokens, pool, tightly=True)
        self.layers = [_ViewLayer(self, idx) for idx in range(geometry.num_layers)]
        self.view, self._pages = SequenceView(chunks, self.keys, self.values, rotations), pages

    def own_rows(self, positions: Tensor) -> Tensor:
        """Return which of its own rows tokens behind all chunks have, int64."""
        return positions - self.shown_tokens

    def copy_rows(self, cache: FusedCache, positions: Tensor) -> None:
        """Take over what no chunk shows.

        Parameters
        ----------
        cache : FusedCache
            The whole prompt's.
        positions : Tensor
            int64, ascending: all positions of the prompt that no chunk shows.
        """
        for own, whole in ((self.keys, cache.keys), (self.values, cache.values)):
            own[:, :, :, : positions.shape[0]] = torch.index_select(whole, 3, positions)
        self.length = cache.length

    def release(self) -> None:
        """Let go of the chunks' pages and give the memory back; as :meth:`.FusedCache.release`."""
        super().release()
        self.view, self._pages = SequenceView([], self.keys, self.values, self.view.rotations), ()

    @property
    def nbytes(self) -> int:
        """Bytes of what it does not share."""
        return self.view.own_nbytes
