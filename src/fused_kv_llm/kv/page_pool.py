"""Chunk pages: KV of chunks as it was prefilled, in memory once for all requests that decode over it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fused_kv_kernels import LayerRotations, SharedChunk
from fused_kv_llm.model import Geometry
from fused_kv_llm.store import StoredKV

__all__ = ["ChunkPage", "PagePool", "why_not_shared"]

Shifts = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class ChunkPage:
    """One chunk's KV in all layers, and the context shifts that requests have added to it.

    Parameters
    ----------
    stored : StoredKV
        The open chunk. What is in memory already is not copied.

    Raises
    ------
    ChunkDamagedError
        If it has to be read again, and is damaged.
    """

    def __init__(self, stored: StoredKV) -> None:
        self.position, self.num_tokens = stored.position, stored.num_tokens
        self._plain = SharedChunk(*stored.read_layers(0, stored.num_layers))
        self._shifted: dict[Hashable, SharedChunk] = {}

    def seen(self) -> SharedChunk:
        """Return the chunk for a request that adds no shift: any version will do, since its shift gets weight 0."""
        return next(iter(self._shifted.values()), self._plain)

    def seen_with(self, version: Hashable, read: Callable[[], Shifts]) -> SharedChunk:
        """Return it with a context shift.

        Parameters
        ----------
        version : hashable
            Which of the shifts that the chunk has had: a request keeps the one that it was fused with.
        read : callable
            Returns it, if no request has brought it yet.
        """
        if version not in self._shifted:
            self._shifted[version] = SharedChunk(self._plain.keys, self._plain.values, read())
        return self._shifted[version]

    def has(self, version: Hashable) -> bool:
        """Whether it has a shift already."""
        return version in self._shifted

    @property
    def nbytes(self) -> int:
        """Bytes of its KV and of all shifts."""
        plain = self._plain.nbytes
        return plain + sum(shifted.nbytes - plain for shifted in self._shifted.values())


class PagePool:
    """The pages that an engine's requests share.

    A page lives as long as a request refers to it: nobody has to give it back. Chunks are named by their keys, which
    depend on the tenant, so tenants never share one.

    Parameters
    ----------
    geometry : Geometry

    Attributes
    ----------
    rotations : LayerRotations
        The model's.
    """

    def __init__(self, geometry: Geometry) -> None:
        first = geometry.rotations[0]
        self.rotations = LayerRotations([one.inv_freq for one in geometry.rotations], first.interleaved)
        self._pages: WeakValueDictionary[str, ChunkPage] = WeakValueDictionary()

    def get(self, stored: StoredKV) -> ChunkPage | None:
        """Return the page of a chunk if there is one, prefilled where this one was."""
        page = self._pages.get(stored.key)
        fits = page is not None and (page.position, page.num_tokens) == (stored.position, stored.num_tokens)
        return page if fits else None

    def take(self, stored: StoredKV) -> ChunkPage:
        """Return the page of a chunk, made from the open chunk if there is none; raises as :class:`ChunkPage`."""
        page = self.get(stored)
        if page is None:
            page = self._pages[stored.key] = ChunkPage(stored)
        return page

    @property
    def nbytes(self) -> int:
        """Bytes of all pages. What the store's memory tier holds as well counts in both."""
        return sum(page.nbytes for page in self._pages.values())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._pages)


def why_not_shared(geometry: Geometry, device: torch.device) -> str | None:
    """Return why a model's requests cannot decode over shared pages; None if they can."""
    rotations = {(one.inv_freq.shape, one.interleaved) for one in geometry.rotations}
    reasons = {
        f"there is no operator for views of shared chunks on {device.type}": device.type != "cpu",
        "the model's layers do not attend to what they cache": not geometry.attends_cache or geometry.swaps,
        "the model's layers have KV of several shapes": not geometry.has_one_shape,
        "some of the model's layers attend to KV of others": geometry.last_layer != geometry.num_layers - 1,
        "some of the model's layers have a window": len(geometry.global_layers) != geometry.num_layers,
        "the model's layers rotate keys in several ways": len(rotations) > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
