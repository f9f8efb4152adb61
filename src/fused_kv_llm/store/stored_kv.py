"""What a caller holds of an opened chunk, whichever tier it comes from."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal, Protocol

import torch

from fused_kv_llm.errors import ConfigError, StoreError
from fused_kv_llm.store.header import ChunkHeader

__all__ = ["LayerSource", "StoredKV"]


class LayerSource(Protocol):
    """Where an opened chunk's layers come from: one class for each tier."""

    @property
    def header(self) -> ChunkHeader:
        """What the chunk's file says about it."""

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return verified layers ``start`` to ``stop - 1``."""

    def release(self) -> None:
        """Let go of the chunk."""


class StoredKV:
    """A chunk that was opened for reading; a context manager.

    Obtained from ``KVStore.open``. Reads from several threads are safe.

    Parameters
    ----------
    tier : {"memory", "disk"}
        Where the layers come from.
    source : LayerSource
        What gives them.
    """

    __slots__ = ("_closed", "_lock", "_source", "tier")

    def __init__(self, tier: Literal["memory", "disk"], source: LayerSource) -> None:
        self.tier: Literal["memory", "disk"] = tier
        self._source = source
        self._closed = False
        self._lock = threading.Lock()

    @property
    def key(self) -> str:
        """The chunk's key."""
        return self._source.header.key

    @property
    def identity(self) -> str:
        """Digest of the identity for which the KV is valid, as the chunk's file says it."""
        return self._source.header.identity

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self._source.header.num_tokens

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self._source.header.num_layers

    @property
    def position(self) -> int:
        """Position of the first token when the chunk was prefilled."""
        return self._source.header.position

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the keys and values."""
        return self._source.header.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self._source.header.nbytes

    def read_layers(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of layers ``start`` to ``stop - 1``, verified against their checksums.

        Parameters
        ----------
        start, stop : int
            ``0 <= start <= stop <= num_layers``.

        Returns
        -------
        keys, values : torch.Tensor
            ``[stop - start, kv_heads, tokens, head_dim]`` on the CPU. They are views of buffers that other
            requests use too and stay valid after ``close``: do not write to them.

        Raises
        ------
        ChunkDamagedError
            One of these layers is damaged. Give its key and reason to ``KVStore.discard``.
        ConfigError
            The range is not inside the chunk's layers.
        StoreError
            The chunk was closed.
        """
        if not 0 <= start <= stop <= self.num_layers:
            raise ConfigError(f"Layers {start}..{stop} are not a range inside 0..{self.num_layers}.")
        if self._closed:
            raise StoreError(f"The KV of chunk {self.key[:16]} was closed. Read its layers before close().")
        return self._source.read(start, stop)

    def close(self) -> None:
        """Let go of the chunk; layers that were read stay valid. Closing twice is harmless."""
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
