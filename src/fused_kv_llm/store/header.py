"""The header of a chunk's file: what it says, and why it can be believed.

The header carries its own checksum at a fixed place, so that it is verified before anything in it is parsed.
After that its claims are still checked against each other and against the file's actual size, because a
file that is whole may come from elsewhere.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from fused_kv_llm.chunk import FORMAT_VERSION, ContentHash
from fused_kv_llm.errors import ChunkDamagedError

__all__ = ["DTYPES", "ChunkHeader", "encode_header", "read_header"]

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_ALIGNMENT = 64
_FIRST_READ = 32 * 1024
# The checksum covers the header without its own sixteen digits, which is why they stand first.
_OPENING = b'{"__metadata__":{"header_xxh3_64":"'
_CHECKSUM = slice(len(_OPENING), len(_OPENING) + 16)


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What the header of a chunk's file says.

    Parameters
    ----------
    key : str
        The chunk's key.
    identity : str
        Digest of the identity for which the KV is valid.
    text : str
        The chunk's text.
    content : ContentHash
        Hashes of the text.
    token_ids : tuple of int
        The chunk's stand-alone token ids.
    position : int
        Position of the first token when the chunk was prefilled.
    dtype : torch.dtype
        Stored dtype.
    shape : tuple of int
        ``(layers, kv_heads, tokens, head_dim)`` of the keys, and of the values.
    key_checksums, value_checksums : tuple of str
        xxh3-64 of each layer's bytes, sixteen hexadecimal digits.
    data_start : int
        Offset of the keys' first byte in the file.
    """

    key: str
    identity: str
    text: str
    content: ContentHash
    token_ids: tuple[int, ...]
    position: int
    dtype: torch.dtype
    shape: tuple[int, int, int, int]
    key_checksums: tuple[str, ...]
    value_checksums: tuple[str, ...]
    data_start: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.shape[2]

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer's keys, and of its values."""
        return self.shape[1] * self.shape[2] * self.shape[3] * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return 2 * self.num_layers * self.layer_nbytes


def encode_header(metadata: dict[str, str], dtype: str, shape: list[int], tensor_nbytes: int) -> bytes:
    """Return the beginning of a file: the header's length, and the header with its checksum.

    Parameters
    ----------
    metadata : dict of str to str
        What ``ChunkHeader`` needs besides the tensors' places.
    dtype : str
        A name in ``DTYPES``.
    shape : list of int
        Of the keys, and of the values.
    tensor_nbytes : int
        Bytes of the keys, and of the values.
    """
    header = {
        "__metadata__": {"header_xxh3_64": "0" * 16, **metadata},
        "k": {"dtype": dtype, "shape": shape, "data_offsets": [0, tensor_nbytes]},
        "v": {"dtype": dtype, "shape": shape, "data_offsets": [tensor_nbytes, 2 * tensor_nbytes]},
    }
    raw = bytearray(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode())
    raw += b" " * (-(8 + len(raw)) % _ALIGNMENT)
    raw[_CHECKSUM] = _checksum(raw)
    return len(raw).to_bytes(8, "little") + raw


def read_header(fd: int, key: str, file_nbytes: int) -> ChunkHeader:
    """Read and verify the header of an open file.

    Parameters
    ----------
    fd : int
        The file, open for reading.
    key : str
        The chunk the file should hold.
    file_nbytes : int
        The file's actual size.

    Returns
    -------
    ChunkHeader
        The header; its tensors fill the file exactly.

    Raises
    ------
    ChunkDamagedError
        The file is truncated, altered, foreign, of another format version, or another chunk's.
    OSError
        The file cannot be read.
    """
    raw = _read_raw(fd, key, file_nbytes)
    if not raw.startswith(_OPENING):
        raise ChunkDamagedError(key, "it is not a chunk-KV file")
    if raw[_CHECKSUM] != _checksum(raw):
        raise ChunkDamagedError(key, "the checksum of its header does not match")
    try:
        header = _parse(key, json.loads(raw), 8 + len(raw))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ChunkDamagedError(key, f"its header cannot be understood ({error!r})") from error
    if header.key != key:
        raise ChunkDamagedError(key, f"the file holds another chunk, {header.key[:16]}")
    if header.data_start + header.nbytes != file_nbytes:
        expected = header.data_start + header.nbytes
        raise ChunkDamagedError(key, f"the file has {file_nbytes} bytes, its header describes {expected}")
    return header


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


def _parse(key: str, header: Any, data_start: int) -> ChunkHeader:
    metadata = header["__metadata__"]
    if metadata["format_version"] != str(FORMAT_VERSION):
        found = metadata["format_version"]
        raise ChunkDamagedError(key, f"it has format version {found}, this release reads {FORMAT_VERSION}")
    layers, heads, tokens, dim = header["k"]["shape"]
    prefix, full, length = json.loads(metadata["content"])
    parsed = ChunkHeader(
        key=_text(metadata["key"]),
        identity=_text(metadata["identity"]),
        text=_text(metadata["text"]),
        content=ContentHash(_natural(prefix), _natural(full), _natural(length)),
        token_ids=tuple(_natural(i) for i in json.loads(metadata["token_ids"])),
        position=_natural(json.loads(metadata["position"])),
        dtype=DTYPES[header["k"]["dtype"]],
        shape=(_positive(layers), _positive(heads), _positive(tokens), _positive(dim)),
        key_checksums=tuple(json.loads(metadata["k_xxh3_64"])),
        value_checksums=tuple(json.loads(metadata["v_xxh3_64"])),
        data_start=data_start,
    )
    half = parsed.nbytes // 2
    tensor = {"dtype": header["k"]["dtype"], "shape": list(parsed.shape)}
    if header["k"] != {**tensor, "data_offsets": [0, half]}:
        raise ValueError("k is not where it should be")
    if header["v"] != {**tensor, "data_offsets": [half, 2 * half]}:
        raise ValueError("v is not where it should be")
    if len(parsed.token_ids) != tokens:
        raise ValueError(f"{len(parsed.token_ids)} token ids for {tokens} tokens")
    if not len(parsed.key_checksums) == len(parsed.value_checksums) == layers:
        raise ValueError(f"not one checksum for each of {layers} layers")
    return parsed


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a natural number")
    return number


def _positive(number: Any) -> int:
    if _natural(number) == 0:
        raise ValueError("a dimension is 0")
    return int(number)
