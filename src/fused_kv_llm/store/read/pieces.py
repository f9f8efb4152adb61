"""Reading pieces of a file's tensors, verified: the only place where stored bytes become tensor bytes.

Everything is verified every time. What the system has in its cache may have come from the disk a moment ago, whoever
asked for it, and the disk may have changed a bit since this process read the same bytes before. Reads are cut into
blocks that stay in the processor's cache until they are hashed; from a disk that is faster than one large read too,
because the system reads ahead between them. What the system has in its cache is a matter of the processor: native code
reads it, a large part of it in two threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import xxhash

from fused_kv_llm.store.format import FileCipher, Part
from fused_kv_llm.store.read.destination import Destination
from fused_kv_llm.store.read.native_pieces import Outcome, read_natively
from fused_kv_llm.store.read.strided import Segments

__all__ = ["CAN_ANNOUNCE", "announce", "begin_reading", "read_destinations", "read_pieces"]

_READ_NBYTES = 1 << 20
# Below this, waking a thread takes as long as it saves.
_SHARED_NBYTES = 1 << 20
# Below this, calling native code takes as long as it saves.
_NATIVE_NBYTES = 256 << 10
_MOST_SEGMENTS = 1024  # IOV_MAX of Linux
# Whether the system can be asked to read ahead.
CAN_ANNOUNCE = hasattr(os, "posix_fadvise")


class _Block(NamedTuple):
    """Pieces that are read at once: the tensor, the first, their memory, and where they are in the file."""

    part: Part
    start: int
    segments: Sequence[memoryview]
    each: int
    offset: int


def read_pieces(
    fd: int,
    part: Part,
    cipher: FileCipher | None,
    start: int,
    stop: int,
    target: memoryview,
) -> list[int]:
    """Read pieces ``start`` to ``stop - 1`` of a tensor.

    Parameters
    ----------
    fd : int
        The file.
    part : Part
        The tensor.
    cipher : FileCipher or None
        What decrypts the file; encrypted pieces are authenticated every time.
    start, stop : int
        The pieces.
    target : memoryview
        Where their bytes go; exactly as many.

    Returns
    -------
    list of int
        The pieces that are damaged; what is in `target` for them is meaningless.

    Raises
    ------
    OSError, EOFError
        The file cannot be read, or is too short.
    """
    size = part.piece_nbytes
    if cipher is None:
        return [piece for _, piece in read_destinations(fd, [Destination(part, start, Segments.of(target, size))])]
    pieces = [target[number * size : (number + 1) * size] for number in range(stop - start)]
    stored = size + part.overhead
    sealed = memoryview(bytearray((stop - start) * stored))
    _read_exactly(fd, [sealed], part.start + start * stored)
    damaged = []
    for number, data in enumerate(pieces):
        message = sealed[number * stored : (number + 1) * stored]
        if not cipher.open_into(part.message + start + number, message, data):
            damaged.append(start + number)
    return damaged


def announce(fd: int, parts: Sequence[Part], start: int, stop: int) -> None:
    """Tell the system that pieces ``start`` to ``stop - 1`` of some tensors will be read soon.

    It then reads what it does not have from the disk by itself, and nobody has to wait for it meanwhile. What the
    system makes of it is its own affair: there is no error, and where it cannot be told nothing happens.
    """
    if not CAN_ANNOUNCE:
        return
    for part in parts:
        stored = part.piece_nbytes + part.overhead
        with suppress(OSError):
            os.posix_fadvise(fd, part.start + start * stored, (stop - start) * stored, os.POSIX_FADV_WILLNEED)


def read_destinations(
    fd: int, wanted: Sequence[Destination], begin: Callable[[], object] | None = None
) -> list[tuple[str, int]]:
    """Read pieces to where they belong, from a file that is not encrypted.

    Parameters
    ----------
    fd : int
        The file.
    wanted : sequence of Destination
        The pieces.
    begin : callable or None
        Called before anything is read that the system has not in its cache.

    Returns
    -------
    list of (str, int)
        The pieces that are damaged, by their tensors' names; what is in the memory for them is meaningless.

    Raises
    ------
    OSError, EOFError
        The file cannot be read, or is too short.
    """
    nbytes = sum(place.nbytes for place in wanted)
    done = read_natively(fd, wanted, shared=nbytes >= _SHARED_NBYTES) if nbytes >= _NATIVE_NBYTES else None
    if done is None:
        done = Outcome([(number, 0, place.segments.pieces) for number, place in enumerate(wanted)], [])
    if not done.left:
        return sorted(done.damaged)
    if begin is not None:
        begin()
    return _read_rest(fd, wanted, done)


def begin_reading(fd: int, file_nbytes: int) -> None:
    """Have the system read a file ahead, as it does for who reads from the beginning.

    Without it, the first read is one from somewhere inside the file, and the next ones are far from it: keys and values
    lie apart.
    """
    if file_nbytes >= _READ_NBYTES and CAN_ANNOUNCE:
        # Whatever goes wrong here, who reads what is needed meets it again and says so.
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            os.pread(fd, 1, 0)


def _read_rest(fd: int, wanted: Sequence[Destination], done: Outcome) -> list[tuple[str, int]]:
    """Read what native code has not."""
    damaged = list(done.damaged)
    for number, first, last in done.left:
        for block in _blocks(wanted[number], first, last, _READ_NBYTES):
            _read_exactly(fd, block.segments, block.offset)
            damaged += _damaged(block)
    return sorted(damaged)


def _blocks(place: Destination, first: int, last: int, nbytes: int) -> Iterator[_Block]:
    """Yield blocks of some pieces, counted from the destination's first."""
    part, start, segments = place
    size = part.piece_nbytes
    step = max(1, nbytes // max(1, size))
    while first < last:
        end = min(last, first + step)
        memory = segments.views(first, end)
        yield _Block(part, start + first, memory, segments.views_each, part.start + (start + first) * size)
        first = end


def _damaged(block: _Block) -> Iterator[tuple[str, int]]:
    """Yield those of a block's pieces whose checksums do not match."""
    part, start, segments, each = block[:4]
    for number in range(len(segments) // each):
        if _digest(segments[number * each : (number + 1) * each]) != part.digests[start + number]:
            yield part.name, start + number


def _digest(piece: Sequence[memoryview]) -> str:
    if len(piece) == 1:
        return xxhash.xxh3_64_hexdigest(piece[0])
    digest = xxhash.xxh3_64()
    for segment in piece:
        digest.update(segment)
    return digest.hexdigest()


def _read_exactly(fd: int, segments: Sequence[memoryview], offset: int) -> None:
    for first in range(0, len(segments), _MOST_SEGMENTS):
        rest = _after(segments[first : first + _MOST_SEGMENTS], 0)
        while rest:
            count = os.preadv(fd, rest, offset)
            if count == 0:
                raise EOFError("the file was shortened")
            rest = _after(rest, count)
            offset += count


def _after(segments: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of segments after so many bytes."""
    for number, segment in enumerate(segments):
        if count < len(segment):
            return [segment[count:], *segments[number + 1 :]]
        count -= len(segment)
    return []
