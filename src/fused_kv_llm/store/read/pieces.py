"""Reading pieces of a file's tensors, verified: the only place where stored bytes become tensor bytes.

Every piece is verified every time it is read. The page cache proves nothing: its content may have come from the disk a
moment ago, and the disk may have flipped a bit since this process last read the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from fused_kv_llm.store.format import Part
from fused_kv_llm.store.read.blocks import BlockReader, read_block
from fused_kv_llm.store.read.buffers import map_pages

__all__ = ["CAN_ANNOUNCE", "announce", "begin_reading", "read_pieces"]

# Small enough to stay in the processor's cache until it is hashed, and for the system to read ahead between reads.
_BLOCK_NBYTES = 1 << 20
# Whether the system can be asked to read ahead.
CAN_ANNOUNCE = hasattr(os, "posix_fadvise")


def read_pieces(
    fd: int, part: Part, start: int, stop: int, target: memoryview, read: BlockReader = read_block
) -> list[int]:
    """Read and verify pieces ``start`` to ``stop - 1`` of a tensor.

    Parameters
    ----------
    fd : int
        The file.
    part : Part
        The tensor.
    start, stop : int
        The pieces.
    target : memoryview
        Receives their bytes; exactly as many.
    read : BlockReader
        Reads the bytes.

    Returns
    -------
    list of int
        The damaged pieces; their bytes in `target` are meaningless.

    Raises
    ------
    OSError, EOFError
        The file cannot be read, or is too short.
    """
    map_pages(target)
    size, stored_size = part.piece_nbytes, part.stored_piece_nbytes
    step = max(1, _BLOCK_NBYTES // max(1, stored_size))
    damaged = []
    for first in range(start, stop, step):
        count = min(step, stop - first)
        plain = target[(first - start) * size :][: count * size]
        stored = plain if stored_size == size else memoryview(bytearray(count * stored_size))
        read(fd, stored, part.start + first * stored_size)
        for i in range(count):
            piece = stored[i * stored_size : (i + 1) * stored_size], plain[i * size : (i + 1) * size]
            if not part.verify(first + i, *piece):
                damaged.append(first + i)
    return damaged


def announce(fd: int, parts: Sequence[Part], start: int, stop: int) -> None:
    """Ask the system to read pieces ``start`` to ``stop - 1`` of some tensors ahead.

    It then reads from the disk whatever is not in its cache while the caller does something else. The request is a
    hint: it raises nothing, and does nothing on a system without ``posix_fadvise``.
    """
    if not CAN_ANNOUNCE:
        return
    for part in parts:
        stored = part.stored_piece_nbytes
        with suppress(OSError):
            os.posix_fadvise(fd, part.start + start * stored, (stop - start) * stored, os.POSIX_FADV_WILLNEED)


def begin_reading(fd: int, file_nbytes: int) -> None:
    """Have the system read a file ahead as it does for one that is read from its beginning.

    The header of a known file is not read again, so the first read lands inside the file, and the next ones are far
    from it because keys and values lie apart: the system would not read ahead by itself.
    """
    if file_nbytes >= _BLOCK_NBYTES and CAN_ANNOUNCE:
        # An error here comes again with the first real read, which reports it.
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            os.pread(fd, 1, 0)
