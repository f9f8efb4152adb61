"""Reading a whole file to see whether it is what it should be."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.format import ChunkHeader, FileCodec, FileHeader
from fused_kv_llm.store.read.pieces import read_pieces

__all__ = ["as_file", "verify_chunk", "verify_sidecar"]


def verify_chunk(codec: FileCodec, fd: int, key: str, scratch: bytearray | None = None) -> ChunkHeader:
    """Verify the header and every layer of a chunk's file.

    Parameters
    ----------
    codec : FileCodec
        Decodes it.
    fd : int
        The file, open for reading.
    key : str
        The chunk that it should hold.
    scratch : bytearray or None
        Memory to read into, grown as needed; give the same to verify many files.

    Raises
    ------
    ChunkDamagedError
        Something is wrong with the file; the reason says what.
    """
    with _read_errors(key):
        header = codec.read_chunk_header(fd, key, _size(fd, key))
        _verify_pieces(fd, header, bytearray() if scratch is None else scratch)
    return header


def verify_sidecar(codec: FileCodec, fd: int, key: str, name: str, scratch: bytearray | None = None) -> FileHeader:
    """Verify the header and all tensors of a sidecar; takes and raises what ``verify_chunk`` does."""
    with _read_errors(key):
        header = codec.read_header(fd, key, name, _size(fd, key))
        _verify_pieces(fd, header, bytearray() if scratch is None else scratch)
    return header


@contextmanager
def as_file(data: bytes | memoryview) -> Iterator[int]:
    """Give a descriptor of a file in memory, so that bytes from elsewhere are verified as files are."""
    with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None, buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) or 0 :]
        yield file.fileno()


@contextmanager
def _read_errors(key: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise ChunkDamagedError(key, f"it cannot be read ({error})") from error


def _size(fd: int, key: str) -> int:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise ChunkDamagedError(key, "it is not a regular file")
    return info.st_size


def _verify_pieces(fd: int, header: FileHeader, scratch: bytearray) -> None:
    for part in header.parts:
        if len(scratch) < part.piece_nbytes:
            scratch.extend(bytes(part.piece_nbytes - len(scratch)))
        with memoryview(scratch) as whole:
            for piece in range(header.num_pieces):
                if read_pieces(fd, part, piece, piece + 1, whole[: part.piece_nbytes]):
                    reason = f"the checksum of {part.name!r} of {header.piece(piece)} does not match"
                    raise ChunkDamagedError(header.key, reason)
