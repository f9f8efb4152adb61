"""An opened chunk, whichever tier it comes from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

import torch

from fused_kv_llm.errors import ConfigError, StoreError
from fused_kv_llm.store.format import ChunkHeader, expand

__all__ = ["LayerSource", "StoredKV", "StoredLayers", "Tier"]

Tier = Literal["memory", "disk", "remote"]


class LayerSource(Protocol):
    """Where an opened chunk's layers come from: memory, or its file."""

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the stored tensors of layers ``start`` to ``stop - 1``, verified."""

    def announce(self, start: int, stop: int) -> None:
        """Ask the system to read layers ``start`` to ``stop - 1`` ahead, where they have to be read from a disk."""

    def release(self) -> None:
        """Release the chunk."""


class StoredLayers(NamedTuple):
    """Some layers of a chunk as ``fused_kv_kernels.place_chunks`` takes them.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[layers, kv_heads, tokens, head_dim]``, int8 or the chunk's dtype.
    scales : tuple of torch.Tensor, or None
        float16 scales of int8 keys ``[layers, kv_heads, 1, head_dim]`` and values ``[layers, kv_heads, tokens, 1]``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(part.nbytes for part in (self.keys, self.values, *(self.scales or ())))

    def layer(self, number: int) -> StoredLayers:
        """Return one of the layers, without its axis."""
        return self._each(lambda part: part[number])

    def to(self, device: torch.device) -> StoredLayers:
        """Return them on a device; from pinned memory the copies run beside the caller."""
        return self._each(lambda part: part.to(device, non_blocking=True))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> StoredLayers:
        scales = None if self.scales is None else (change(self.scales[0]), change(self.scales[1]))
        return StoredLayers(change(self.keys), change(self.values), scales)


class StoredKV:
    """A chunk that was opened for reading; a context manager.

    Obtained from ``KVStore.open``. Reads from several threads are safe.

    Parameters
    ----------
    tier : {"memory", "disk", "remote"}
        The tier that the layers come from.
    header : ChunkHeader
        What the chunk's file says about it.
    source : LayerSource
        Gives the layers; ``close`` releases it.
    """

    __slots__ = ("_closed", "_header", "_lock", "_source", "tier")

    def __init__(self, tier: Tier, header: ChunkHeader, source: LayerSource) -> None:
        self.tier: Tier = tier
        self._header = header
        self._source = source
        self._closed = False
        self._lock = threading.Lock()

    @property
    def header(self) -> ChunkHeader:
        """What the chunk's file says about it."""
        return self._header

    @property
    def key(self) -> str:
        """The chunk's key."""
        return self._header.key

    @property
    def identity(self) -> str:
        """Digest of the identity for which the KV is valid, as the chunk's file says it."""
        return self._header.identity

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self._header.num_tokens

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self._header.num_layers

    @property
    def position(self) -> int:
        """Position of the first token when the chunk was prefilled."""
        return self._header.position

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the keys and values that ``read_layers`` returns."""
        return self._header.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, as they are stored."""
        return self._header.nbytes

    @property
    def storage(self) -> str:
        """Dtype in which the keys and values are stored, one of ``STORAGE_DTYPES``."""
        return self._header.storage

    @property
    def is_stored_as_read(self) -> bool:
        """Whether ``read_stored`` gives views of what is stored, rather than tensors made from it."""
        return self.storage in ("int8", str(self.dtype).removeprefix("torch."))

    def read_layers(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of layers ``start`` to ``stop - 1``, verified against their checksums.

        Parameters
        ----------
        start, stop : int
            ``0 <= start <= stop <= num_layers``.

        Returns
        -------
        keys, values : torch.Tensor
            ``[stop - start, kv_heads, tokens, head_dim]`` on the CPU, in ``dtype``. If they are stored in it, they are
            views of buffers that other requests use too: do not write to them. They stay valid after ``close``.

        Raises
        ------
        ChunkDamagedError
            One of these layers is damaged. Give its key and reason to ``KVStore.discard``.
        ConfigError
            The range is not inside the chunk's layers.
        StoreError
            The chunk was closed.
        """
        return expand(self._read(start, stop), self._header.storage, self.dtype, self._header.value_dim)

    def read_stored(self, start: int, stop: int) -> StoredLayers:
        """Return what ``read_layers`` returns, but int8 as it is stored; raises as it does."""
        parts = self._read(start, stop)
        if self._header.storage == "int8":
            return StoredLayers(parts["k"], parts["v"], (parts["k_scale"], parts["v_scale"]))
        return StoredLayers(*expand(parts, self._header.storage, self.dtype, self._header.value_dim))

    def load_layers(self, start: int, stop: int) -> None:
        """Bring layers ``start`` to ``stop - 1`` into memory, where the other methods find them; raises as they do."""
        self._read(start, stop)

    def announce_layers(self, start: int, stop: int) -> None:
        """Ask the system to read layers ``start`` to ``stop - 1`` ahead, since they will be needed soon.

        Raises
        ------
        ConfigError, StoreError
            As ``read_layers``.
        """
        self._check(start, stop)
        self._source.announce(start, stop)

    def _read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        self._check(start, stop)
        return self._source.read(start, stop)

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.num_layers:
            raise ConfigError(f"Layers {start}..{stop} are not a range inside 0..{self.num_layers}.")
        if self._closed:
            raise StoreError(f"The KV of chunk {self.key[:16]} was closed. Read its layers before close().")

    def close(self) -> None:
        """Release the chunk; layers that were read stay valid. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._source.release()

    def __enter__(self) -> StoredKV:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
