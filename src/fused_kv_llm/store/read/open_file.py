"""Reading one open file, piece by piece, verified, into buffers that the memory tier can keep."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from typing import NamedTuple

import torch

from fused_kv_llm.errors import ChunkDamagedError, ReadTimeoutError, StoreError
from fused_kv_llm.store.folder import FileVersion
from fused_kv_llm.store.format import FileHeader, Part, byte_view
from fused_kv_llm.store.read.blocks import BlockReader, read_block
from fused_kv_llm.store.read.buffers import ReadBuffers
from fused_kv_llm.store.read.memory import ResidentFile
from fused_kv_llm.store.read.pieces import announce, begin_reading, read_pieces

__all__ = ["KnownFile", "OpenFile"]

_ALIGNMENT = 64


class KnownFile(NamedTuple):
    """A file whose header this process has verified.

    Parameters
    ----------
    version : FileVersion
        The file's when its header was read.
    header : FileHeader
        The header.
    """

    version: FileVersion
    header: FileHeader


class OpenFile:
    """One open file, shared by everyone who reads it at the moment.

    Pieces are read once, whoever asks first; others wait for them. The buffers are as large as the whole file, so that
    a file that was read completely needs no copy to be kept in memory.

    Parameters
    ----------
    fd : int
        The file, open for reading; closed when all pieces are read or the last user releases it.
    known : KnownFile
        Its version and verified header.
    buffers : ReadBuffers
        Gives the memory.
    on_done : callable
        Called with the file when all pieces are in the buffers, and again when the last user releases it.
    stream : bool
        Read into memory that only the caller of ``read`` holds, every time anew: for a file that is not worth keeping.
    keeps : bool
        Whether it is kept in memory when all of it has been read. Any user may ask for it.
    read_block : BlockReader
        Reads bytes of the file.
    patience_s : float or None
        For how many seconds a thread waits for another one's read; None for as long as it takes.
    """

    def __init__(
        self,
        fd: int,
        known: KnownFile,
        buffers: ReadBuffers,
        on_done: Callable[[OpenFile], None],
        *,
        stream: bool = False,
        keeps: bool = True,
        read_block: BlockReader = read_block,
        patience_s: float | None = None,
    ) -> None:
        self.version, self.header = known
        self._buffers = buffers
        self._on_done = on_done
        self._stream = stream
        self.keeps = keeps
        self._read_block, self._patience_s = read_block, patience_s
        self._users = 1
        self._reads = 0
        self._is_begun = False
        self._changed = threading.Condition()
        self._loaded: set[int] = set()
        self._loading: set[int] = set()
        self._tensors: dict[str, torch.Tensor] = {}
        self._memory: dict[str, memoryview] = {}
        # A FileIO closes itself when a forgotten OpenFile is collected; a bare descriptor would leak. It comes last, so
        # that the caller still owns the descriptor if anything above fails.
        self._file = FileIO(fd, "rb")

    @property
    def is_complete(self) -> bool:
        """Whether all pieces are in the buffers."""
        return len(self._loaded) == self.header.num_pieces

    def resident(self) -> ResidentFile:
        """Return the buffers for the memory tier; only when the file is complete."""
        return ResidentFile(self.version, self.header, self._tensors)

    def retain(self) -> bool:
        """Add a user; False if the file is closed and cannot be used again."""
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
            self._changed.wait_for(lambda: not self._reads)
            self._file.close()
        self._on_done(self)

    def announce(self, start: int, stop: int) -> None:
        """Ask the system to read pieces ``start`` to ``stop - 1`` ahead, unless they have been read."""
        with self._changed:
            if self._users and not self._loaded.issuperset(range(start, stop)):
                announce(self._file.fileno(), self.header.parts, start, stop)

    def read(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return pieces ``start`` to ``stop - 1`` of every tensor; raises as ``load``."""
        if not self._stream:
            self.load(start, stop)
            return {name: tensor[start:stop] for name, tensor in self._tensors.items()}
        tensors, memory = _carve(self._buffers, self.header.parts, stop - start, briefly=True)
        with self._changed:
            self._begin_read()
        try:
            _, damage = self._read(start, stop, memory)
        finally:
            with self._changed:
                self._end_read()
        if damage is not None:
            raise damage
        return tensors

    def read_all(self) -> dict[str, torch.Tensor]:
        """Return all tensors; raises as ``load``."""
        self.load(0, self.header.num_pieces)
        return self._tensors

    def load(self, start: int, stop: int) -> None:
        """Read those of pieces ``start`` to ``stop - 1`` into the buffers that nobody has read yet.

        Raises
        ------
        ChunkDamagedError
            One of these pieces is damaged or cannot be read. The others are unaffected.
        ReadTimeoutError
            Another thread reads one of them, and does not come back.
        StoreError
            The file was closed.
        """
        wanted = set(range(start, stop))
        with self._changed:
            if not self._changed.wait_for(lambda: not wanted & self._loading, self._patience_s):
                raise ReadTimeoutError(self.header.key, self._patience_s or 0.0)
            missing = wanted - self._loaded
            if not self._tensors:
                self._tensors, self._memory = _carve(self._buffers, self.header.parts, self.header.num_pieces)
            if not missing:
                return
            self._begin_read()
            self._loading |= missing
        damage: ChunkDamagedError | None = None
        verified: set[int] = set()
        try:
            for first, last in _runs(sorted(missing)):
                good, found = self._read(first, last, _cut(self._memory, self.header.parts, first, last))
                verified |= good
                damage = damage or found
        finally:
            with self._changed:
                self._loading -= missing
                self._loaded |= verified
                self._end_read()
                complete = bool(verified) and self.is_complete
                if complete:
                    self._file.close()
        if complete:
            self._on_done(self)
        if damage is not None:
            raise damage

    def _begin_read(self) -> None:
        if self._users == 0:
            raise StoreError(f"The KV of chunk {self.header.key[:16]} was closed while it was being read.")
        self._reads += 1
        if not self._is_begun:
            self._is_begun = True
            begin_reading(self._file.fileno(), self.version.size)

    def _end_read(self) -> None:
        self._reads -= 1
        self._changed.notify_all()

    def _read(
        self, start: int, stop: int, memory: Mapping[str, memoryview]
    ) -> tuple[set[int], ChunkDamagedError | None]:
        """Read pieces ``start`` to ``stop - 1`` of all tensors; return the good ones, and what is wrong with others."""
        header, damaged = self.header, dict[int, str]()
        try:
            for part in header.parts:
                found = read_pieces(self._file.fileno(), part, start, stop, memory[part.name], self._read_block)
                for piece in found:
                    damaged.setdefault(piece, part.name)
        except (OSError, EOFError) as error:
            if stop - start > 1:
                return self._read_singly(start, stop, memory)
            return set(), ChunkDamagedError(header.key, f"{header.piece(start)} cannot be read ({error})")
        if not damaged:
            return set(range(start, stop)), None
        piece, name = next(iter(damaged.items()))
        reason = f"the checksum of {name!r} of {header.piece(piece)} does not match"
        return set(range(start, stop)) - damaged.keys(), ChunkDamagedError(header.key, reason)

    def _read_singly(
        self, start: int, stop: int, memory: Mapping[str, memoryview]
    ) -> tuple[set[int], ChunkDamagedError | None]:
        """Find out which pieces of a range that cannot be read as a whole can be read by themselves."""
        results = [
            self._read(piece, piece + 1, _cut(memory, self.header.parts, piece - start, piece - start + 1))
            for piece in range(start, stop)
        ]
        good = set[int]().union(*(pieces for pieces, _ in results))
        return good, next((damage for _, damage in results if damage is not None), None)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the maximal runs of consecutive numbers in an ascending list, as half-open ranges."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1] + 1
            start = i


def _carve(
    buffers: ReadBuffers, parts: Sequence[Part], num_pieces: int, *, briefly: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, memoryview]]:
    """Return tensors for so many pieces of each part, all in one buffer, and their bytes."""
    sizes = [num_pieces * part.piece_nbytes for part in parts]
    ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    buffer = buffers.take(ends[-1], briefly=briefly)
    whole = byte_view(buffer)
    tensors, memory = {}, {}
    for part, size, begin in zip(parts, sizes, (0, *ends), strict=False):
        shape = part.shape if num_pieces == len(part.digests) else (num_pieces, *part.shape[1:])
        tensors[part.name] = buffer[begin : begin + size].view(part.dtype).view(shape)
        memory[part.name] = whole[begin : begin + size]
    return tensors, memory


def _cut(memory: Mapping[str, memoryview], parts: Sequence[Part], first: int, last: int) -> dict[str, memoryview]:
    """Return the bytes of pieces ``first`` to ``last - 1``."""
    return {part.name: memory[part.name][first * part.piece_nbytes : last * part.piece_nbytes] for part in parts}
