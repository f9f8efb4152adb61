"""Reading pieces of a file's tensors, verified: the only place where stored bytes become tensor bytes.

Bytes that were verified before are believed as long as the system still has them in its cache; what comes from the
disk once more is verified once more. Reads are cut into parts that stay in the processor's cache until they are
hashed; from a disk that is faster than one large read too, because the system reads ahead between them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import xxhash

from fused_kv_llm.store.cipher import FileCipher
from fused_kv_llm.store.tensor_file import Part

__all__ = ["read_pieces", "scatter_pieces"]

_READ_NBYTES = 1 << 20
_MOST_SEGMENTS = 1024  # IOV_MAX of Linux
# Reads what the system has in its cache, and nothing else; only Linux has it.
_CACHED_ONLY: int | None = getattr(os, "RWF_NOWAIT", None)


def read_pieces(
    fd: int,
    part: Part,
    cipher: FileCipher | None,
    start: int,
    stop: int,
    target: memoryview,
    *,
    verified: bool = False,
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
    verified : bool
        Whether these pieces of this file were verified before.

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
    pieces = [target[begin : begin + size] for begin in range(0, (stop - start) * size, size)]
    if cipher is None:
        return scatter_pieces(fd, part, start, pieces, verified=verified)
    stored = size + part.overhead
    sealed = memoryview(bytearray((stop - start) * stored))
    _read_exactly(fd, [sealed], part.start + start * stored)
    damaged = []
    for number, data in enumerate(pieces):
        message = sealed[number * stored : (number + 1) * stored]
        if not cipher.open_into(part.message + start + number, message, data):
            damaged.append(start + number)
    return damaged


def scatter_pieces(
    fd: int, part: Part, start: int, segments: Sequence[memoryview], each: int = 1, *, verified: bool = False
) -> list[int]:
    """Read pieces of a tensor, the first of them ``start``, to where their bytes belong.

    Parameters
    ----------
    segments : sequence of memoryview
        The memory, in the order of the bytes.
    each : int
        How many segments take one piece.

    Notes
    -----
    The file is not encrypted; otherwise as :func:`read_pieces`.
    """
    size, count = part.piece_nbytes, len(segments) // each
    at_once = max(1, _READ_NBYTES // max(1, size))
    done = 0
    if verified:
        # If the first of them are not cached, asking for all would have the system read ahead all of it, and wait.
        for stop in (min(at_once, count), count):
            offset, nbytes = part.start + (start + done) * size, (stop - done) * size
            if not _read_cached(fd, segments[done * each : stop * each], offset, nbytes):
                break
            done = stop
    damaged = []
    for first in range(done, count, at_once):
        last = min(first + at_once, count)
        _read_exactly(fd, segments[first * each : last * each], part.start + (start + first) * size)
        digests = [_digest(segments[number * each : (number + 1) * each]) for number in range(first, last)]
        expected = part.digests[start + first : start + last]
        damaged += [start + first + i for i in range(last - first) if digests[i] != expected[i]]
    return damaged


def _digest(piece: Sequence[memoryview]) -> str:
    if len(piece) == 1:
        return xxhash.xxh3_64_hexdigest(piece[0])
    digest = xxhash.xxh3_64()
    for segment in piece:
        digest.update(segment)
    return digest.hexdigest()


def _read_cached(fd: int, segments: Sequence[memoryview], offset: int, nbytes: int) -> bool:
    """Read bytes that the system has in its cache; False if it has not all of them, or cannot tell."""
    if _CACHED_ONLY is None:
        return False
    try:
        for first in range(0, len(segments), _MOST_SEGMENTS):
            count = os.preadv(fd, segments[first : first + _MOST_SEGMENTS], offset, _CACHED_ONLY)
            offset, nbytes = offset + count, nbytes - count
    except OSError:
        # Whatever it is, an ordinary read meets it again and says so.
        return False
    return nbytes == 0


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
