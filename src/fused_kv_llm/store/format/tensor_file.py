"""A safetensors file whose header and tensors carry checksums, so that nothing in it is believed unverified.

::

    u64 little endian   length of the header
    header              JSON, padded with spaces so that the data starts at a multiple of 64 bytes
    tensors             little endian, contiguous, in the header's order

The file is an ordinary safetensors file, so any tool can open it; ``tensor_encoder`` writes it. Every tensor is cut
along its first axis into pieces (a chunk's layers), each with its own xxh3-64, so that pieces can be read and trusted
one by one. In an encrypted file a piece is an AES-GCM message followed by its tag, and the header shows the tensors as
numbered bytes; their names, dtypes and shapes are in the encrypted part of the metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from fused_kv_llm.chunk import FORMAT_VERSION
from fused_kv_llm.errors import ChunkDamagedError, ChunkKeyError
from fused_kv_llm.store.format.cipher import Cipher, FileCipher
from fused_kv_llm.store.format.part import DTYPES, Part

__all__ = [
    "CHECKSUM_NBYTES",
    "HEADER_CHECKSUM",
    "TensorFile",
    "bound_metadata",
    "check_natural",
    "check_text",
    "header_checksum",
    "read_tensor_file",
]

_FIRST_READ = 32 * 1024
_OPENING = b'{"__metadata__":{"header_xxh3_64":"'
HEADER_CHECKSUM = slice(len(_OPENING), len(_OPENING) + 16)
"""Where the header's checksum is: first, since it covers the header without its own sixteen digits."""

CHECKSUM_NBYTES = 8 + HEADER_CHECKSUM.stop
"""Bytes at the beginning of a file that tell it from others, since the header's checksum is in them."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A verified header.

    Parameters
    ----------
    metadata : dict
        What was given to ``encode_tensors``, public and private.
    parts : tuple of Part
        The tensors, in file order; they fill the file exactly.
    """

    metadata: dict[str, Any]
    parts: tuple[Part, ...]


def read_tensor_file(fd: int, key: str, file_nbytes: int, cipher: Cipher | None) -> TensorFile:
    """Read and verify the header of an open file.

    Parameters
    ----------
    fd : int
        The file, open for reading.
    key : str
        The chunk, for messages.
    file_nbytes : int
        The file's actual size.
    cipher : Cipher or None
        Decrypts it.

    Raises
    ------
    ChunkDamagedError
        The file is truncated, altered, foreign, or of another format version.
    ChunkKeyError
        It is encrypted with another key, or its sealed part was altered; or only one of file and store is encrypted.
    OSError
        The file cannot be read.
    """
    raw = _read_raw(fd, key, file_nbytes)
    if not raw.startswith(_OPENING):
        raise ChunkDamagedError(key, "it is not a chunk-KV file")
    if raw[HEADER_CHECKSUM] != header_checksum(raw):
        raise ChunkDamagedError(key, "the checksum of its header does not match")
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        found = metadata["format_version"]
        if found != str(FORMAT_VERSION):
            raise ChunkDamagedError(key, f"it has format version {found}, this release reads {FORMAT_VERSION}")
        opened, secret = _open_private(key, metadata, cipher)
        parts = _parts(header, secret["tensors"], 8 + len(raw), opened)
        about = secret["about"]
        public = {name: check_text(value) for name, value in metadata.items() if name not in ("private", "sealed")}
        file = TensorFile({**about, **public}, parts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ChunkDamagedError(key, f"its header cannot be understood ({error!r})") from error
    expected = 8 + len(raw) + sum(part.stored_nbytes for part in parts)
    if expected != file_nbytes:
        raise ChunkDamagedError(key, f"the file has {file_nbytes} bytes, its header describes {expected}")
    return file


def header_checksum(raw: bytes | bytearray) -> bytes:
    """Return the checksum of a header, without the digits of the one that it contains."""
    digest = xxhash.xxh3_64(raw[: HEADER_CHECKSUM.start])
    digest.update(raw[HEADER_CHECKSUM.stop :])
    return digest.hexdigest().encode()


def bound_metadata(public: Mapping[str, str]) -> bytes:
    """Return the bytes that an encrypted header is bound to, so that its public metadata cannot be exchanged."""
    return json.dumps(dict(public), sort_keys=True).encode()


def _open_private(key: str, metadata: dict[str, str], cipher: Cipher | None) -> tuple[FileCipher | None, Any]:
    if "sealed" not in metadata:
        if cipher is not None:
            raise ChunkKeyError(key, "it is not encrypted, but the store is", plain=True)
        return None, json.loads(metadata["private"])
    if cipher is None:
        raise ChunkKeyError(key, "it is encrypted, but the store is not")
    opened = cipher.open_file(metadata["cipher"])
    public = {name: value for name, value in metadata.items() if name not in ("header_xxh3_64", "cipher", "sealed")}
    secret = opened.open_text(metadata["sealed"], bound_metadata(public)) if opened is not None else None
    if secret is None:
        raise ChunkKeyError(key, "it was encrypted with another key, or altered")
    return opened, json.loads(secret)


def _parts(shown: Any, described: Any, data_start: int, cipher: FileCipher | None) -> tuple[Part, ...]:
    if list(shown) != (list(described) if cipher is None else [str(number) for number in range(len(described))]):
        raise ValueError("the tensors are not those described")
    parts: list[Part] = []
    offset = message = 0
    for (name, about), place in zip(described.items(), shown.values(), strict=True):
        shape = tuple(check_natural(size) for size in about["shape"])
        digests = tuple(about["xxh3_64"])
        part = Part(name, DTYPES[about["dtype"]], shape, data_start + offset, digests, cipher, message)
        if set(map(type, digests)) - {str}:
            raise TypeError(f"a digest of {name} is not a string")
        if not digests or part.nbytes % len(digests):
            raise ValueError(f"{name} has {len(digests)} digests for {part.nbytes} bytes")
        end = offset + part.stored_nbytes
        visible = (about["dtype"], list(shape)) if cipher is None else ("U8", [part.stored_nbytes])
        if place != {"dtype": visible[0], "shape": visible[1], "data_offsets": [offset, end]}:
            raise ValueError(f"{name} is not where it should be")
        parts.append(part)
        offset, message = end, message + len(digests)
    return tuple(parts)


def _read_raw(fd: int, key: str, file_nbytes: int) -> bytes:
    first = os.pread(fd, _FIRST_READ, 0)
    if len(first) < 8:
        raise ChunkDamagedError(key, f"the file has only {file_nbytes} bytes")
    length = int.from_bytes(first[:8], "little")
    if 8 + length > file_nbytes:
        raise ChunkDamagedError(key, f"the file has {file_nbytes} bytes, its header alone claims {length}")
    raw = first[8 : 8 + length]
    while len(raw) < length:
        more = os.pread(fd, length - len(raw), 8 + len(raw))
        if not more:
            raise ChunkDamagedError(key, "the file ends inside its header")
        raw += more
    return raw


def check_text(value: Any) -> str:
    """Return a value of a header that must be a string; TypeError if it is not."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def check_natural(number: Any) -> int:
    """Return a value of a header that must be an integer of at least 0; ValueError if it is not."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a natural number")
    return number
