"""Reading a whole file to see whether it is what it should be."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.format import ChunkHeader, Cipher, read_header
from fused_kv_llm.store.read.pieces import read_pieces

__all__ = ["as_file", "verify_chunk"]


def verify_chunk(fd: int, key: str, cipher: Cipher | None, scratch: bytearray | None = None) -> ChunkHeader:
    """Verify the header and every piece of a chunk's file.

    Parameters
    ----------
    fd : int
        The file, open for reading.
    key : str
        The chunk it should hold.
    cipher : Cipher or None
        What decrypts it.
    scratch : bytearray or None
        Memory to read into, grown as needed; for calls one after another.

    Returns
    -------
    ChunkHeader

    Raises
    ------
    ChunkDamagedError
        Something is wrong with it; the reason says what.
    """
    scratch = bytearray() if scratch is None else scratch
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ChunkDamagedError(key, "it is not a regular file")
        header = read_header(fd, key, info.st_size, cipher)
        for part in header.parts:
            if len(scratch) < part.piece_nbytes:
                scratch.extend(bytes(part.piece_nbytes - len(scratch)))
            with memoryview(scratch) as whole:
                for layer in range(header.num_layers):
                    if read_pieces(fd, part, header.cipher, layer, layer + 1, whole[: part.piece_nbytes]):
                        raise ChunkDamagedError(key, f"the checksum of {part.name!r} of layer {layer} does not match")
    except (OSError, EOFError) as error:
        raise ChunkDamagedError(key, f"it cannot be read ({error})") from error
    return header


@contextmanager
def as_file(data: bytes | memoryview) -> Iterator[int]:
    """Give a descriptor of a file in memory, so that what came from elsewhere is verified like a file."""
    with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None, buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) or 0 :]
        yield file.fileno()
