"""Reading one chunk's file layer by layer, verified, into buffers that can become the memory tier's.

What the memory tier does not keep anyway is read straight to where a request needs it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from fused_kv_llm.errors import ChunkDamagedError, StoreError
from fused_kv_llm.store.buffers import BufferPool
from fused_kv_llm.store.header import ChunkHeader
from fused_kv_llm.store.known import KnownFile
from fused_kv_llm.store.memory import ResidentChunk
from fused_kv_llm.store.pieces import read_pieces, scatter_pieces
from fused_kv_llm.store.strided import layer_segments
from fused_kv_llm.store.tensor_file import Part, byte_view

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
    known : KnownFile
        The file's verified header, and which layers were verified before.
    pool : BufferPool
        Where the buffers come from.
    on_complete : callable
        Called once with the loader when all layers are there.
    on_unused : callable
        Called with the loader when its last user released it.
    keep : bool
        Whether the chunk is to become the memory tier's, so that its layers belong into the buffers.
    """

    def __init__(
        self,
        fd: int,
        known: KnownFile,
        pool: BufferPool,
        on_complete: Callable[[ChunkLoader], None],
        on_unused: Callable[[ChunkLoader], None],
        *,
        keep: bool,
    ) -> None:
        self.header = known.header
        self._known = known
        self._opened_ns = time.time_ns()
        self._pool = pool
        self._on_complete = on_complete
        self._on_unused = on_unused
        self._keep = keep
        self._users = 1
        self._direct_reads = 0
        self._changed = threading.Condition()
        self._loaded: set[int] = set()
        self._loading: set[int] = set()
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes: dict[str, memoryview] = {}
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
            self._changed.wait_for(lambda: not self._loading and not self._direct_reads)
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
            self._check_used(missing)
            if not self._tensors:
                self._tensors = _carve(self._pool, self.header)
                self._bytes = {name: byte_view(tensor) for name, tensor in self._tensors.items()}
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

    def read_into(self, start: int, stop: int, targets: Mapping[str, torch.Tensor], tokens: range) -> bool:
        """Read layers ``start`` to ``stop - 1`` to where they are needed, without the shared buffers.

        Parameters
        ----------
        start, stop : int
            The layers.
        targets : mapping of str to torch.Tensor
            For every stored tensor, ``[stop - start, kv_heads, tokens, head_dim]``.
        tokens : range
            Which of the chunk's tokens.

        Returns
        -------
        bool
            False if that cannot be done; then the targets' content is undefined, and ``read`` gives the layers.

        Raises
        ------
        ChunkDamagedError
            One of these layers is damaged.
        """
        segments = {} if self._keep or self.header.cipher is not None else self._segments(targets, stop - start, tokens)
        wanted = set(range(start, stop))
        with self._changed:
            if not segments or not wanted.isdisjoint(self._loaded | self._loading):
                return False
            self._check_used(wanted)
            self._direct_reads += 1
        try:
            good, damage = self._scatter(start, stop, segments)
        except (OSError, EOFError):
            # The other way finds out which of the layers can be read.
            return False
        finally:
            with self._changed:
                self._direct_reads -= 1
                self._close_if_complete()
                self._changed.notify_all()
        self._known.note(good, self._opened_ns)
        if damage is not None:
            raise damage
        return True

    def _segments(
        self, targets: Mapping[str, torch.Tensor], layers: int, tokens: range
    ) -> dict[str, tuple[list[memoryview], int]]:
        """Return where each stored tensor's layers belong; empty if they cannot go there as they are stored."""
        found: dict[str, tuple[list[memoryview], int]] = {}
        for part in self.header.parts:
            target = targets.get(part.name)
            if target is None or target.dtype != part.dtype:
                return {}
            segments = layer_segments(target, (layers, *self.header.shape[1:]), tokens)
            if segments is None:
                return {}
            found[part.name] = segments
        return found

    def _check_used(self, wanted: set[int]) -> None:
        if wanted and self._users == 0:
            raise StoreError(f"The KV of chunk {self.header.key[:16]} was closed while it was being read.")

    def _finish(self, attempted: set[int], verified: set[int]) -> None:
        with self._changed:
            self._loading -= attempted
            self._loaded |= verified
            complete = bool(verified) and len(self._loaded) == self.header.num_layers
            self._close_if_complete()
            self._changed.notify_all()
        self._known.note(verified, self._opened_ns)
        if complete:
            self._on_complete(self)

    def _close_if_complete(self) -> None:
        if len(self._loaded) == self.header.num_layers and not self._direct_reads:
            self._file.close()

    def _load(self, start: int, stop: int) -> tuple[set[int], ChunkDamagedError | None]:
        """Read layers ``start`` to ``stop - 1``; return the good ones, and what is wrong with others."""
        header, fd = self.header, self._file.fileno()

        def read(part: Part, *, verified: bool) -> list[int]:
            target = self._bytes[part.name][start * part.piece_nbytes : stop * part.piece_nbytes]
            return read_pieces(fd, part, header.cipher, start, stop, target, verified=verified)

        try:
            return self._read_parts(start, stop, read)
        except (OSError, EOFError) as error:
            if stop - start > 1:
                return self._load_singly(start, stop)
            return set(), ChunkDamagedError(header.key, f"layer {start} cannot be read ({error})")

    def _scatter(
        self, start: int, stop: int, segments: Mapping[str, tuple[list[memoryview], int]]
    ) -> tuple[set[int], ChunkDamagedError | None]:
        """As ``_load``, to other memory; raises OSError and EOFError."""
        fd = self._file.fileno()

        def read(part: Part, *, verified: bool) -> list[int]:
            return scatter_pieces(fd, part, start, *segments[part.name], verified=verified)

        return self._read_parts(start, stop, read)

    def _read_parts(
        self, start: int, stop: int, read: Callable[..., list[int]]
    ) -> tuple[set[int], ChunkDamagedError | None]:
        good = set(range(start, stop))
        verified = self._known.is_verified(self._file.fileno(), good)
        damage: ChunkDamagedError | None = None
        for part in self.header.parts:
            for layer in read(part, verified=verified):
                good.discard(layer)
                reason = f"the checksum of {part.name!r} of layer {layer} does not match"
                damage = damage or ChunkDamagedError(self.header.key, reason)
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
