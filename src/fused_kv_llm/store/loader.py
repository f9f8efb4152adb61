"""Reading one chunk's file layer by layer, verified, into buffers that can become the memory tier's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

from fused_kv_llm.errors import ChunkDamagedError, StoreError
from fused_kv_llm.store.buffers import BufferPool
from fused_kv_llm.store.header import ChunkHeader
from fused_kv_llm.store.memory import ResidentChunk
from fused_kv_llm.store.pieces import read_pieces
from fused_kv_llm.store.tensor_file import byte_view

__all__ = ["ChunkLoader"]

_ALIGNMENT = 64


class ChunkLoader:
    """One open file, shared by everyone who reads the chunk at the moment.

    Layers are read once, whoever asks first; others wait for them. The buffers are as large as the whole
    chunk, so that a chunk that was read completely needs no copy to be kept in memory.

    Parameters
    ----------
    fd : int
        The file, open for reading; closed when all layers are read or nobody uses the loader any more.
    header : ChunkHeader
        The file's verified header.
    pool : BufferPool
        Where the buffers come from.
    on_complete : callable
        Called once with the loader when all layers are there.
    on_unused : callable
        Called with the loader when its last user released it.
    """

    def __init__(
        self,
        fd: int,
        header: ChunkHeader,
        pool: BufferPool,
        on_complete: Callable[[ChunkLoader], None],
        on_unused: Callable[[ChunkLoader], None],
    ) -> None:
        self.header = header
        self._on_complete = on_complete
        self._on_unused = on_unused
        self._users = 1
        self._changed = threading.Condition()
        self._loaded: set[int] = set()
        self._loading: set[int] = set()
        self._tensors = _carve(pool, header)
        self._bytes = {name: byte_view(tensor) for name, tensor in self._tensors.items()}
        # A FileIO rather than a bare descriptor: forgotten loaders close their file when collected. Last, so
        # that a failure above leaves the descriptor to the caller.
        self._file = open(fd, "rb", buffering=0)  # noqa: SIM115

    def resident(self) -> ResidentChunk:
        """Return the buffers as a chunk for the memory tier; only when all layers are there."""
        return ResidentChunk(self.header, self._tensors)

    def retain(self) -> bool:
        """Add a user; False if the file is closed and the loader cannot be used again."""
        with self._changed:
            if self._users == 0:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """Remove a user; the last one closes the file, after reads in flight have ended."""
        with self._changed:
            self._users -= 1
            if self._users:
                return
            self._changed.wait_for(lambda: not self._loading)
            self._file.close()
        self._on_unused(self)

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the stored tensors of layers ``start`` to ``stop - 1``, reading those that nobody has read yet.

        Raises
        ------
        ChunkDamagedError
            One of these layers is damaged or cannot be read. The others are unaffected.
        """
        wanted = set(range(start, stop))
        with self._changed:
            self._changed.wait_for(lambda: not wanted & self._loading)
            missing = wanted - self._loaded
            if missing and self._users == 0:
                raise StoreError(f"The KV of chunk {self.header.key[:16]} was closed while it was being read.")
            self._loading |= missing
        if missing:
            damage: ChunkDamagedError | None = None
            verified: set[int] = set()
            try:
                for first, last in _runs(sorted(missing)):
                    good, found = self._load(first, last)
                    verified |= good
                    damage = damage or found
            finally:
                self._finish(missing, verified)
            if damage is not None:
                raise damage
        return {name: tensor[start:stop] for name, tensor in self._tensors.items()}

    def _finish(self, attempted: set[int], verified: set[int]) -> None:
        with self._changed:
            self._loading -= attempted
            self._loaded |= verified
            complete = bool(verified) and len(self._loaded) == self.header.num_layers
            if complete:
                self._file.close()
            self._changed.notify_all()
        if complete:
            self._on_complete(self)

    def _load(self, start: int, stop: int) -> tuple[set[int], ChunkDamagedError | None]:
        """Read layers ``start`` to ``stop - 1``; return the good ones, and what is wrong with others."""
        header, good = self.header, set(range(start, stop))
        damage: ChunkDamagedError | None = None
        try:
            for part in header.parts:
                span = slice(start * part.piece_nbytes, stop * part.piece_nbytes)
                target = self._bytes[part.name][span]
                for layer in read_pieces(self._file.fileno(), part, header.cipher, start, stop, target):
                    good.discard(layer)
                    reason = f"the checksum of {part.name!r} of layer {layer} does not match"
                    damage = damage or ChunkDamagedError(header.key, reason)
        except (OSError, EOFError) as error:
            if stop - start > 1:
                return self._load_singly(start, stop)
            return set(), ChunkDamagedError(header.key, f"layer {start} cannot be read ({error})")
        return good, damage

    def _load_singly(self, start: int, stop: int) -> tuple[set[int], ChunkDamagedError | None]:
        """Find out which layers of an unreadable range are readable on their own."""
        results = [self._load(layer, layer + 1) for layer in range(start, stop)]
        good = set[int]().union(*(layers for layers, _ in results))
        return good, next((damage for _, damage in results if damage is not None), None)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the maximal runs of consecutive numbers in an ascending list, as half-open ranges."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1] + 1
            start = i


def _carve(pool: BufferPool, header: ChunkHeader) -> dict[str, torch.Tensor]:
    """Return the chunk's tensors, all in one buffer."""
    places: dict[str, int] = {}
    size = 0
    for part in header.parts:
        places[part.name] = size
        size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = pool.take(size)
    return {
        part.name: buffer[places[part.name] : places[part.name] + part.nbytes].view(part.dtype).view(part.shape)
        for part in header.parts
    }
