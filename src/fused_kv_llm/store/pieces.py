"""Reading pieces of a file's tensors, verified: the only place where stored bytes become tensor bytes."""

from __future__ import annotations

import os

import xxhash

from fused_kv_llm.store.cipher import FileCipher
from fused_kv_llm.store.tensor_file import Part

__all__ = ["read_pieces"]


def read_pieces(fd: int, part: Part, cipher: FileCipher | None, start: int, stop: int, target: memoryview) -> list[int]:
    """Read pieces ``start`` to ``stop - 1`` of a tensor.

    Parameters
    ----------
    fd : int
        The file.
    part : Part
        The tensor.
    cipher : FileCipher or None
        What decrypts the file.
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
    pieces = [(piece, target[(piece - start) * size : (piece - start + 1) * size]) for piece in range(start, stop)]
    if cipher is None:
        _read_exactly(fd, target, part.start + start * size)
        return [piece for piece, data in pieces if xxhash.xxh3_64_hexdigest(data) != part.digests[piece]]
    stored = size + part.overhead
    sealed = memoryview(bytearray((stop - start) * stored))
    _read_exactly(fd, sealed, part.start + start * stored)
    damaged = []
    for piece, data in pieces:
        message = sealed[(piece - start) * stored : (piece - start + 1) * stored]
        if not cipher.open_into(part.message + piece, message, data):
            damaged.append(piece)
    return damaged


def _read_exactly(fd: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(fd, [target], offset)
        if count == 0:
            raise EOFError("the file was shortened")
        target = target[count:]
        offset += count
