"""Sharing: a complete prompt's private copy of its chunks, exchanged for views of pages that other requests see too.

A request is fused in a private copy, since its rows are written and attended to by position. Once its prompt is
complete nobody changes its chunks any more. What it computed itself goes to a small cache of its own then, and the copy
is given back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_kv_kernels import ChunkView, SharedChunk
from fused_kv_llm.kv import ChunkPage, PagePool, PlacedChunk
from fused_kv_llm.model import FusedCache, ViewCache

from .context import FusionContext
from .request import Request
from .request_kv import RequestKV

__all__ = ["Sharing"]

_SHIFT_SCALE_NBYTES = 4


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a request sees of one of its chunks."""

    number: int
    chunk: PlacedChunk
    hidden: Tensor


class Sharing:
    """What sharing would bring a request whose prompt is complete; as long as its chunks are open, it can be done.

    Parameters
    ----------
    context : FusionContext
        With a pool of pages.
    request : Request
    kv : RequestKV
        Complete.
    selected : Tensor
        int64 positions of the chunk tokens that were recomputed, ascending.

    Attributes
    ----------
    own_positions : Tensor
        int64, ascending: the prompt's positions that no chunk shows.
    """

    def __init__(self, context: FusionContext, request: Request, kv: RequestKV, selected: Tensor) -> None:
        self._context, self._kv = context, kv
        kind = request.kind.clone()
        kind[selected] = -1
        self.own_positions = (kind < 0).nonzero()[:, 0]
        self._shown = [
            _Shown(number, chunk, hidden)
            for number, chunk in enumerate(request.chunks)
            if (hidden := _hidden(chunk, kind, number)).shape[0] < chunk.stored.num_tokens
        ]

    @property
    def cache(self) -> FusedCache:
        """The private copy."""
        return self._kv.cache

    @property
    def own_nbytes(self) -> int:
        """Bytes that the request will hold instead of its private copy, pages apart."""
        loaded = self._context.loaded
        rows = int(self.cache.get_max_length()) - self.cache.length + self.own_positions.shape[0]
        heads, *dims = loaded.geometry.room
        of_views = len(self._shown) * loaded.geometry.num_layers * (heads * sum(dims) + 2) * torch.float32.itemsize
        return rows * loaded.geometry.kv_bytes_per_token(loaded.dtype) + of_views

    def new_pages(self) -> dict[str, int]:
        """Return the bytes that pages would take which are not there yet, by chunk key."""
        pages = self._pages
        return {shown.chunk.stored.key: self._missing_nbytes(shown, pages) for shown in self._shown}

    def _missing_nbytes(self, shown: _Shown, pages: PagePool) -> int:
        loaded, stored = self._context.loaded, shown.chunk.stored
        heads, *dims = loaded.geometry.room
        page, version = pages.get(stored), self._version(shown)
        nbytes = 0 if page is not None else stored.num_tokens * loaded.geometry.kv_bytes_per_token(loaded.dtype)
        if version is not None and (page is None or not page.has(version)):
            nbytes += stored.num_tokens * loaded.geometry.num_layers * heads * (sum(dims) + 2 * _SHIFT_SCALE_NBYTES)
        return nbytes

    @property
    def _pages(self) -> PagePool:
        if self._context.pages is None:
            raise RuntimeError("an engine without a pool of pages shares none")
        return self._context.pages

    def _version(self, shown: _Shown) -> object:
        shifts = self._kv.shifts
        return None if shifts is None else shifts.version(shown.chunk.stored.key)

    def share(self) -> tuple[ViewCache, int]:
        """Exchange the private copy, which is given back.

        Returns
        -------
        tuple of ViewCache and int
            What the request holds now, and the bytes of the pages that it shares, each counted once.

        Raises
        ------
        ChunkDamagedError, StoreError
            If a page has to be read again and cannot be. The private copy is as it was then.
        """
        with torch.inference_mode():
            pages = {shown.chunk.stored.key: self._pages.take(shown.chunk.stored) for shown in self._shown}
            views = [self._view(shown, pages[shown.chunk.stored.key]) for shown in self._shown]
            whole, geometry = self.cache, self._context.loaded.geometry
            num_shown = whole.length - self.own_positions.shape[0]
            own = ViewCache(geometry, whole.get_max_length(), self._context.pool, views, num_shown,
                            self._pages.rotations, list(pages.values()))  # fmt: skip
            own.copy_rows(whole, self.own_positions)
        whole.release()
        return own, sum(page.nbytes for page in pages.values())

    def _view(self, shown: _Shown, page: ChunkPage) -> ChunkView:
        segment, changes = shown.chunk.segment, self._kv.changes
        weights = None if changes is None else changes.weights_of(shown.number)
        vectors = None if changes is None else changes.vectors_of(shown.number)
        chunk = page.seen() if weights is None else self._shifted(shown, page)
        return ChunkView(chunk, segment.start - segment.chunk_start, shown.chunk.delta, weights, vectors, shown.hidden)

    def _shifted(self, shown: _Shown, page: ChunkPage) -> SharedChunk:
        shifts, key = self._kv.shifts, shown.chunk.stored.key
        if shifts is None:
            raise RuntimeError(f"chunk {key[:16]} was shifted by nothing")

        def read() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
            parts = shifts.read_all(key)
            return (parts["keys"], parts["keys_scale"]), (parts["values"], parts["values_scale"])

        return page.seen_with(shifts.version(key), read)


def _hidden(chunk: PlacedChunk, kind: Tensor, number: int) -> Tensor:
    """Return which of a chunk's tokens a request does not see, int64 ``[n]``, ascending."""
    sees = torch.zeros(chunk.stored.num_tokens, dtype=torch.bool)
    sees[chunk.inside] = kind[chunk.segment.start : chunk.segment.stop] == number
    return (~sees).nonzero()[:, 0]
