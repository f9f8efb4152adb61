"""The memory tier: whole chunk KV as it is stored, never more bytes than allowed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fused_kv_llm.store.format import ChunkHeader
from fused_kv_llm.store.index import Entry, EvictionQueue, Policy

__all__ = ["MemoryTier", "ResidentChunk"]


@dataclass(frozen=True, slots=True)
class ResidentChunk:
    """A chunk whose KV was read and verified completely.

    Parameters
    ----------
    header : ChunkHeader
        What its file says about it.
    tensors : dict of str to torch.Tensor
        What is stored for the chunk, layers first, on the CPU. Shared by everyone who opens the chunk.
    """

    header: ChunkHeader
    tensors: dict[str, torch.Tensor]

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return views of layers ``start`` to ``stop - 1``."""
        return {name: tensor[start:stop] for name, tensor in self.tensors.items()}

    def announce(self, start: int, stop: int) -> None:
        """Do nothing: all of it is there."""

    def load(self, start: int, stop: int) -> None:
        """Do nothing: all of it is there."""

    def read_into(self, start: int, stop: int, targets: Mapping[str, torch.Tensor], tokens: range) -> bool:
        """Return False: what is in memory is copied by whoever needs it."""
        return False

    def release(self) -> None:
        """Do nothing: a resident chunk holds no file."""


class MemoryTier:
    """Byte-budgeted cache of chunk KV; thread-safe.

    Parameters
    ----------
    budget_nbytes : int
        Most bytes of keys and values held at any time; 0 holds nothing. Chunks that a request still uses
        live on after their eviction until the request lets go of them.
    policy : callable
        Which chunk to let go of first.
    """

    def __init__(self, budget_nbytes: int, policy: Policy) -> None:
        self.budget_nbytes = budget_nbytes
        self._chunks: dict[str, ResidentChunk] = {}
        self._queue = EvictionQueue(policy)
        self._ticks = itertools.count()
        self._nbytes = 0
        self.evictions = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> ResidentChunk | None:
        """Return a chunk and count its use; None if it is not held."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._queue.touch(key, next(self._ticks))
            return chunk

    def put(self, chunk: ResidentChunk, cost: float = 0.0) -> bool:
        """Hold a chunk, letting go of others first.

        Parameters
        ----------
        chunk : ResidentChunk
        cost : float
            What computing it again takes; 0 stands for its number of tokens.

        Returns
        -------
        bool
            False if the chunk alone is larger than the budget and was not taken.
        """
        header = chunk.header
        if header.nbytes > self.budget_nbytes:
            return False
        with self._lock:
            self._remove(header.key)
            while self._nbytes + header.nbytes > self.budget_nbytes:
                victim = self._queue.pop()
                if victim is None:
                    return False
                self._remove(victim)
                self.evictions += 1
            self._chunks[header.key] = chunk
            self._queue.put(header.key, Entry(header.nbytes, cost or header.num_tokens, used=next(self._ticks)))
            self._nbytes += header.nbytes
        return True

    def discard(self, key: str) -> None:
        """Let go of a chunk, if it is held."""
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            for key in list(self._chunks):
                self._remove(key)

    def usage(self) -> tuple[int, int]:
        """Return how many chunks and how many bytes are held."""
        with self._lock:
            return len(self._chunks), self._nbytes

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._chunks

    def _remove(self, key: str) -> None:
        self._queue.remove(key)
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self._nbytes -= chunk.header.nbytes
