"""A safetensors file whose header and tensors carry digests, so that nothing in it is believed unverified.

::

    u64 little endian   length of the header
    header              JSON, padded with spaces so that the data starts at a multiple of 64 bytes
    tensors             little endian, contiguous, in the header's order

The file is an ordinary safetensors file, so any tool can look at it. The header is built here and not by the
``safetensors`` package for three reasons: the package copies all tensors once more to serialise them, it does not
promise the order of the metadata, and the header's own checksum has to stand at a fixed place so that it can be
verified before anything in the header is believed.

Every tensor is cut along its first axis into pieces (a chunk's layers), each with its own xxh3-64, so that pieces
can be read and trusted singly. In an encrypted file a piece is an AES-GCM message with its tag behind it, and the
header shows the tensors as numbered bytes; their names, dtypes and shapes are in the sealed part of the metadata.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from fused_kv_llm.errors import ChunkDamagedError, ChunkKeyError
from fused_kv_llm.store.format.cipher import TAG_NBYTES, Cipher, FileCipher
from fused_kv_llm.store.format.digests import Digests

__all__ = ["DTYPES", "Part", "TensorFile", "byte_view", "encode_tensors", "read_tensor_file"]

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 64
_FIRST_READ = 32 * 1024
# The checksum covers the header without its own sixteen digits, which is why they stand first.
_OPENING = b'{"__metadata__":{"header_xxh3_64":"'
_CHECKSUM = slice(len(_OPENING), len(_OPENING) + 16)


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a file.

    Parameters
    ----------
    name : str
    dtype : torch.dtype
    shape : tuple of int
    start : int
        Offset of its first byte in the file.
    digests : Digests
        Of each piece.
    overhead : int
        Bytes that each piece takes in the file beyond its own.
    message : int
        Number of its first piece among the file's encrypted messages.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    digests: Digests
    overhead: int = 0
    message: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def piece_nbytes(self) -> int:
        """Bytes of one piece."""
        return self.nbytes // len(self.digests)

    @property
    def stored_nbytes(self) -> int:
        """Bytes the tensor takes in the file."""
        return self.nbytes + self.overhead * len(self.digests)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A verified header.

    Parameters
    ----------
    metadata : dict
        What was given to ``encode_tensors``, public and private.
    parts : tuple of Part
        The tensors, in file order; they fill the file exactly.
    cipher : FileCipher or None
        What decrypts the pieces.
    """

    metadata: dict[str, Any]
    parts: tuple[Part, ...]
    cipher: FileCipher | None


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def encode_tensors(
    public: Mapping[str, str],
    private: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    num_pieces: int | None,
    cipher: Cipher | None,
) -> list[memoryview]:
    """Lay out a file in memory, without copying tensors that are contiguous and on the CPU.

    Parameters
    ----------
    public : mapping of str to str
        Metadata that stays readable in an encrypted file.
    private : mapping
        Metadata, plain JSON values.
    tensors : mapping of str to torch.Tensor
        The tensors, in file order.
    num_pieces : int or None
        Pieces of every tensor, which divide its bytes evenly; None makes each tensor one piece.
    cipher : Cipher or None
        Encrypts the tensors and the private metadata.

    Returns
    -------
    list of memoryview
        The parts of the file, in order.
    """
    sealer = cipher.new_file() if cipher is not None else None
    described: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    data: list[memoryview] = []
    offset = message = 0
    for name, tensor in tensors.items():
        flat = byte_view(tensor.detach().to("cpu").contiguous())
        pieces = _cut(flat, num_pieces or 1)
        stored = [memoryview(sealer.seal(message + i, piece)) for i, piece in enumerate(pieces)] if sealer else [flat]
        digests = [""] * len(pieces) if sealer else [xxhash.xxh3_64_hexdigest(piece) for piece in pieces]
        message += len(pieces)
        nbytes = sum(len(part) for part in stored)
        shape = list(tensor.shape)
        described[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "xxh3_64": digests}
        place = {"data_offsets": [offset, offset + nbytes]}
        dtype, visible = ("U8", [nbytes]) if sealer else (_NAMES[tensor.dtype], shape)
        shown[str(len(shown)) if sealer else name] = {"dtype": dtype, "shape": visible, **place}
        data += stored
        offset += nbytes
    secret = json.dumps({"about": dict(private), "tensors": described}, ensure_ascii=False, separators=(",", ":"))
    metadata = dict(public)
    if sealer is None:
        metadata["private"] = secret
    else:
        metadata |= {"cipher": sealer.label, "sealed": sealer.seal_text(secret, _bound(public))}
    return [memoryview(encode_header(metadata, shown)), *data]


def encode_header(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file: the header's length, and the header with its checksum."""
    header = {"__metadata__": {"header_xxh3_64": "0" * 16, **metadata}, **tensors}
    raw = bytearray(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode())
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    raw[_CHECKSUM] = _checksum(raw)
    return len(raw).to_bytes(8, "little") + raw


def read_tensor_file(fd: int, key: str, file_nbytes: int, version: str, cipher: Cipher | None) -> TensorFile:
    """Read and verify the header of an open file.

    Parameters
    ----------
    fd : int
        The file, open for reading.
    key : str
        The chunk, for messages.
    file_nbytes : int
        The file's actual size.
    version : str
        The ``format_version`` that the public metadata must have.
    cipher : Cipher or None
        What decrypts it.

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
    if raw[_CHECKSUM] != _checksum(raw):
        raise ChunkDamagedError(key, "the checksum of its header does not match")
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        if metadata["format_version"] != version:
            found = metadata["format_version"]
            raise ChunkDamagedError(key, f"it has format version {found}, this release reads {version}")
        opened, secret = _open_private(key, metadata, cipher)
        parts = _parts(header, secret["tensors"], 8 + len(raw), sealed=opened is not None)
        about = secret["about"]
        public = {name: _text(value) for name, value in metadata.items() if name not in ("private", "sealed")}
        file = TensorFile({**about, **public}, parts, opened)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ChunkDamagedError(key, f"its header cannot be understood ({error!r})") from error
    expected = 8 + len(raw) + sum(part.stored_nbytes for part in parts)
    if expected != file_nbytes:
        raise ChunkDamagedError(key, f"the file has {file_nbytes} bytes, its header describes {expected}")
    return file


def _cut(data: memoryview, count: int) -> list[memoryview]:
    size = len(data) // count
    return [data[i * size : (i + 1) * size] for i in range(count)]


def _bound(public: Mapping[str, str]) -> bytes:
    """Return what an encrypted header is bound to: its public metadata cannot be exchanged."""
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
    secret = opened.open_text(metadata["sealed"], _bound(public)) if opened is not None else None
    if secret is None:
        raise ChunkKeyError(key, "it was encrypted with another key, or altered")
    return opened, json.loads(secret)


def _parts(shown: Any, described: Any, data_start: int, *, sealed: bool) -> tuple[Part, ...]:
    if list(shown) != ([str(number) for number in range(len(described))] if sealed else list(described)):
        raise ValueError("the tensors are not those described")
    parts: list[Part] = []
    offset = message = 0
    for (name, about), place in zip(described.items(), shown.values(), strict=True):
        shape = tuple(_natural(size) for size in about["shape"])
        digests = Digests(about["xxh3_64"])
        overhead = TAG_NBYTES if sealed else 0
        part = Part(name, DTYPES[about["dtype"]], shape, data_start + offset, digests, overhead, message)
        if set(map(type, digests)) - {str}:
            raise TypeError(f"a digest of {name} is not a string")
        if not digests or part.nbytes % len(digests):
            raise ValueError(f"{name} has {len(digests)} digests for {part.nbytes} bytes")
        end = offset + part.stored_nbytes
        visible = ("U8", [part.stored_nbytes]) if sealed else (about["dtype"], list(shape))
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


def _checksum(raw: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_64(raw[: _CHECKSUM.start])
    digest.update(raw[_CHECKSUM.stop :])
    return digest.hexdigest().encode()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a natural number")
    return number
