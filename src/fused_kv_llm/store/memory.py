"""The memory tier: whole chunk KV, least recently used first out, never more bytes than allowed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store.header import ChunkHeader

__all__ = ["MemoryTier", "ResidentChunk"]


@dataclass(frozen=True, slots=True)
class ResidentChunk:
    """A chunk whose KV was read and verified completely.

    Parameters
    ----------
    header : ChunkHeader
        What its file says about it.
    keys, values : torch.Tensor
        ``[layers, kv_heads, tokens, head_dim]`` on the CPU. Shared by everyone who opens the chunk.
    """

    header: ChunkHeader
    keys: torch.Tensor
    values: torch.Tensor

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of layers ``start`` to ``stop - 1``."""
        return self.keys[start:stop], self.values[start:stop]

    def release(self) -> None:
        """Do nothing: a resident chunk holds no file."""


class MemoryTier:
    """Byte-budgeted least-recently-used cache of chunk KV; thread-safe.

    Parameters
    ----------
    budget_nbytes : int
        Most bytes of keys and values held at any time; 0 holds nothing. Chunks that a request still uses
        live on after their eviction until the request lets go of them.

    Raises
    ------
    ConfigError
        The budget is negative.
    """

    def __init__(self, budget_nbytes: int) -> None:
        if budget_nbytes < 0:
            raise ConfigError(f"memory_bytes must be 0 (no memory tier) or more, not {budget_nbytes}.")
        self.budget_nbytes = budget_nbytes
        self._chunks: OrderedDict[str, ResidentChunk] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> ResidentChunk | None:
        """Return a chunk and mark it as just used; None if it is not held."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
            return chunk

    def put(self, chunk: ResidentChunk) -> bool:
        """Hold a chunk, letting go of the least recently used ones first.

        Returns
        -------
        bool
            False if the chunk alone is larger than the budget and was not taken.
        """
        nbytes = chunk.header.nbytes
        if nbytes > self.budget_nbytes:
            return False
        with self._lock:
            self._remove(chunk.header.key)
            while self._nbytes + nbytes > self.budget_nbytes:
                self._remove(next(iter(self._chunks)))
            self._chunks[chunk.header.key] = chunk
            self._nbytes += nbytes
        return True

    def discard(self, key: str) -> None:
        """Let go of a chunk, if it is held."""
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._chunks.clear()
            self._nbytes = 0

    def usage(self) -> tuple[int, int]:
        """Return how many chunks and how many bytes are held."""
        with self._lock:
            return len(self._chunks), self._nbytes

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._chunks

    def _remove(self, key: str) -> None:
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._nbytes -= chunk.header.nbytes
