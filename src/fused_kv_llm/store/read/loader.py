"""Reading one chunk's file layer by layer, verified, into buffers that can become the memory tier's.

What the memory tier does not keep anyway is read straight to where a request needs it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from io import FileIO

import torch

from fused_kv_llm.errors import ChunkDamagedError, StoreError
from fused_kv_llm.store.format import ChunkHeader, Part, byte_view
from fused_kv_llm.store.read.buffers import BufferPool
from fused_kv_llm.store.read.destination import Destination
from fused_kv_llm.store.read.known import KnownFile
from fused_kv_llm.store.read.memory import ResidentChunk
from fused_kv_llm.store.read.pieces import announce, begin_reading, read_destinations, read_pieces
from fused_kv_llm.store.read.strided import Segments, layer_segments

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
        The file's verified header.
    pool : BufferPool
        Where the buffers come from.
    on_complete : callable
        Called once with the loader when all layers are there.
    on_unused : callable
        Called with the loader when its last user released it.
    keep : bool
        Whether the chunk is to become the memory tier's, so that its layers belong into the buffers.
    is_begun : bool
        Whether the header was read from `fd`, so that the system reads ahead already.
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
        is_begun: bool = True,
    ) -> None:
        self.header = known.header
        self._nbytes = known.version[1]
        self._pool = pool
        self._on_complete = on_complete
        self._on_unused = on_unused
        self._keep = keep
        self._users = 1
        self._direct_reads = 0
        self._is_begun = is_begun
        self._changed = threading.Condition()
        self._loaded: set[int] = set()
        self._loading: set[int] = set()
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes: dict[str, memoryview] = {}
        # A FileIO rather than a bare descriptor: forgotten loaders close their file when collected. Last, so
        # that a failure above leaves the descriptor to the caller.
        self._file = FileIO(fd, "rb")

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
        """Return the stored tensors of layers ``start`` to ``stop - 1``; raises as ``load``."""
        self.load(start, stop)
        return {name: tensor[start:stop] for name, tensor in self._tensors.items()}

    def announce(self, start: int, stop: int) -> None:
        """Have the system read layers ``start`` to ``stop - 1`` ahead, unless they have been read."""
        with self._changed:
            if self._users and not self._loaded.issuperset(range(start, stop)):
                announce(self._file.fileno(), self.header.parts, start, stop)

    def load(self, start: int, stop: int) -> None:
        """Read those of layers ``start`` to ``stop - 1`` that nobody has read yet.

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
                self._tensors, self._bytes = _carve(self._pool, self.header)
            self._loading |= missing
        if not missing:
            return
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
        places = None if self._keep or self.header.cipher is not None else self._places(start, stop, targets, tokens)
        if places is None:
            return False
        wanted = frozenset(range(start, stop))
        with self._changed:
            if (self._loaded or self._loading) and not wanted.isdisjoint(self._loaded | self._loading):
                return False
            self._check_used(wanted)
            self._direct_reads += 1
        try:
            _, damage = self._read_to(wanted, places)
        except (OSError, EOFError):
            # The other way finds out which of the layers can be read.
            return False
        finally:
            with self._changed:
                self._direct_reads -= 1
                self._close_if_complete()
                self._changed.notify_all()
        if damage is not None:
            raise damage
        return True

    def _places(
        self, start: int, stop: int, targets: Mapping[str, torch.Tensor], tokens: range
    ) -> list[Destination] | None:
        """Return where each stored tensor's layers belong; None if they cannot go there as they are stored."""
        found = []
        for part in self.header.parts:
            target = targets.get(part.name)
            if target is None or target.dtype != part.dtype:
                return None
            segments = layer_segments(target, (stop - start, *self.header.shape[1:]), tokens)
            if segments is None:
                return None
            found.append(Destination(part, start, segments))
        return found

    def _check_used(self, wanted: Set[int]) -> None:
        if wanted and self._users == 0:
            raise StoreError(f"The KV of chunk {self.header.key[:16]} was closed while it was being read.")

    def _finish(self, attempted: set[int], verified: set[int]) -> None:
        with self._changed:
            self._loading -= attempted
            self._loaded |= verified
            complete = bool(verified) and len(self._loaded) == self.header.num_layers
            self._close_if_complete()
            self._changed.notify_all()
        if complete:
            self._on_complete(self)

    def _close_if_complete(self) -> None:
        if len(self._loaded) == self.header.num_layers and not self._direct_reads:
            self._file.close()

    def _load(self, start: int, stop: int) -> tuple[Set[int], ChunkDamagedError | None]:
        """Read layers ``start`` to ``stop - 1``; return the good ones, and what is wrong with others."""
        header, layers = self.header, frozenset(range(start, stop))
        try:
            if header.cipher is None:
                return self._read_to(layers, [self._in_buffers(part, start, stop) for part in header.parts])
            damaged = []
            for part in header.parts:
                target = self._bytes[part.name][start * part.piece_nbytes : stop * part.piece_nbytes]
                pieces = read_pieces(self._file.fileno(), part, header.cipher, start, stop, target)
                damaged += [(part.name, piece) for piece in pieces]
            return self._judged(layers, damaged)
        except (OSError, EOFError) as error:
            if stop - start > 1:
                return self._load_singly(start, stop)
            return set(), ChunkDamagedError(header.key, f"layer {start} cannot be read ({error})")

    def _in_buffers(self, part: Part, start: int, stop: int) -> Destination:
        tensor, size = self._tensors[part.name], part.piece_nbytes
        place = Segments(tensor, tensor.data_ptr() + start * size, stop - start, 1, size, 0, size)
        return Destination(part, start, place)

    def _read_to(
        self, layers: frozenset[int], wanted: Sequence[Destination]
    ) -> tuple[Set[int], ChunkDamagedError | None]:
        """As ``_load``, to any memory; raises OSError and EOFError."""
        return self._judged(layers, read_destinations(self._file.fileno(), wanted, self._begin))

    def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            begin_reading(self._file.fileno(), self._nbytes)

    def _judged(
        self, layers: frozenset[int], damaged: Sequence[tuple[str, int]]
    ) -> tuple[Set[int], ChunkDamagedError | None]:
        if not damaged:
            return layers, None
        name, layer = damaged[0]
        error = ChunkDamagedError(self.header.key, f"the checksum of {name!r} of layer {layer} does not match")
        return layers.difference(layer for _, layer in damaged), error

    def _load_singly(self, start: int, stop: int) -> tuple[Set[int], ChunkDamagedError | None]:
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


def _carve(pool: BufferPool, header: ChunkHeader) -> tuple[dict[str, torch.Tensor], dict[str, memoryview]]:
    """Return the chunk's tensors, all in one buffer, and their bytes."""
    sizes = [part.nbytes for part in header.parts]
    ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    buffer = pool.take(ends[-1])
    whole = byte_view(buffer)
    tensors, views = {}, {}
    for part, size, begin in zip(header.parts, sizes, (0, *ends), strict=False):
        tensors[part.name] = buffer[begin : begin + size].view(part.dtype).view(part.shape)
        views[part.name] = whole[begin : begin + size]
    return tensors, views
