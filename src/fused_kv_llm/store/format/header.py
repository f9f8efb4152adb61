"""What the header of a chunk's file says about the chunk, and why it can be believed.

The file's own checksums are ``tensor_file``'s business. Here the claims of a header that is whole are checked
against each other, because a file that is whole may come from elsewhere. Everything an index needs is in it, so
that an index can be rebuilt from the files alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fused_kv_llm.chunk import FORMAT_VERSION, ContentHash
from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.format.cipher import Cipher, FileCipher
from fused_kv_llm.store.format.quantize import STORAGE_DTYPES
from fused_kv_llm.store.format.tensor_file import Part, read_tensor_file

__all__ = ["COMPUTE_DTYPES", "FORMAT", "ChunkHeader", "read_header"]

FORMAT = "fused_kv_llm"
COMPUTE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
        Dtype that the keys and values had, and have again when they are read.
    storage : str
        Dtype that they have in the file.
    shape : tuple of int
        ``(layers, kv_heads, tokens, head_dim)`` of the keys, and of the values.
    parts : tuple of Part
        The tensors in the file; a piece is a layer.
    cipher : FileCipher or None
        What decrypts the pieces.
    """

    key: str
    identity: str
    text: str
    content: ContentHash
    token_ids: tuple[int, ...]
    position: int
    dtype: torch.dtype
    storage: str
    shape: tuple[int, int, int, int]
    parts: tuple[Part, ...]
    cipher: FileCipher | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values as they are stored."""
        return sum(part.nbytes for part in self.parts)


def read_header(fd: int, key: str, file_nbytes: int, cipher: Cipher | None = None) -> ChunkHeader:
    """Read and verify the header of an open file.

    Parameters
    ----------
    fd : int
        The file, open for reading.
    key : str
        The chunk the file should hold.
    file_nbytes : int
        The file's actual size.
    cipher : Cipher or None
        What decrypts it.

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
    file = read_tensor_file(fd, key, file_nbytes, str(FORMAT_VERSION), cipher)
    try:
        if file.metadata["format"] != FORMAT:
            raise ChunkDamagedError(key, "it is not a chunk-KV file")
        header = _parse(file.metadata, file.parts, file.cipher)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChunkDamagedError(key, f"its header cannot be understood ({error!r})") from error
    if header.key != key:
        raise ChunkDamagedError(key, f"the file holds another chunk, {header.key[:16]}")
    return header


def _parse(about: dict[str, Any], parts: tuple[Part, ...], cipher: FileCipher | None) -> ChunkHeader:
    layers, heads, tokens, dim = about["shape"]
    prefix, full, length = about["content"]
    header = ChunkHeader(
        key=_text(about["key"]),
        identity=_text(about["identity"]),
        text=_text(about["text"]),
        content=ContentHash(_natural(prefix), _natural(full), _natural(length)),
        token_ids=_naturals(about["token_ids"]),
        position=_natural(about["position"]),
        dtype=COMPUTE_DTYPES[about["dtype"]],
        storage=about["storage"],
        shape=(_positive(layers), _positive(heads), _positive(tokens), _positive(dim)),
        parts=parts,
        cipher=cipher,
    )
    if header.storage not in STORAGE_DTYPES:
        raise ValueError(f"storage dtype {header.storage!r}")
    if len(header.token_ids) != tokens:
        raise ValueError(f"{len(header.token_ids)} token ids for {tokens} tokens")
    expected = _layout(header)
    found = {part.name: (part.dtype, part.shape, len(part.digests)) for part in parts}
    if found != {name: (dtype, shape, layers) for name, (dtype, shape) in expected.items()}:
        raise ValueError("its tensors are not those of a chunk's keys and values")
    return header


def _layout(header: ChunkHeader) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtypes and shapes of the tensors that a chunk of this shape has."""
    layers, heads, tokens, dim = header.shape
    if header.storage in COMPUTE_DTYPES:
        plain = COMPUTE_DTYPES[header.storage], header.shape
        return {"k": plain, "v": plain}
    half, ahead = torch.float16, (layers, heads)
    if header.storage == "int8":
        return {
            "k": (torch.int8, header.shape),
            "k_scale": (half, (*ahead, 1, dim)),
            "v": (torch.int8, header.shape),
            "v_scale": (half, (*ahead, tokens, 1)),
        }
    groups, across = -(-tokens // 32), -(-dim // 32)
    return {
        "k": (torch.uint8, (*ahead, dim, 16 * groups)),
        "k_scale": (half, (*ahead, dim, groups)),
        "k_least": (half, (*ahead, dim, groups)),
        "v": (torch.uint8, (*ahead, tokens, 16 * across)),
        "v_scale": (half, (*ahead, tokens, across)),
        "v_least": (half, (*ahead, tokens, across)),
    }


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a natural number")
    return number


def _naturals(numbers: Any) -> tuple[int, ...]:
    # All at once: one by one it would take a third of the time that reading a header takes.
    found = tuple(numbers)
    if set(map(type, found)) - {int} or (found and min(found) < 0):
        raise ValueError("a token id is no natural number")
    return found


def _positive(number: Any) -> int:
    if _natural(number) == 0:
        raise ValueError("a dimension is 0")
    return int(number)
