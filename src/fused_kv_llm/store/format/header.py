"""What the header of a file says, and why it can be believed.

A file's own checksums are ``tensor_file``'s business. Here the claims of an undamaged header are checked against each
other, because an undamaged file may come from elsewhere. A chunk's header holds everything that its index row holds, so
that an index can be rebuilt from the files alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fused_kv_llm.chunk import ContentHash
from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.format.names import file_name
from fused_kv_llm.store.format.part import Part
from fused_kv_llm.store.format.quantize import STORAGE_DTYPES
from fused_kv_llm.store.format.tensor_file import TensorFile, check_natural, check_text

__all__ = [
    "CHUNK_FORMAT",
    "COMPUTE_DTYPES",
    "SIDECAR_FORMAT",
    "ChunkHeader",
    "FileHeader",
    "chunk_header",
    "sidecar_header",
]

CHUNK_FORMAT, SIDECAR_FORMAT = "fused_kv_llm", "fused_kv_llm.side"
COMPUTE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """What the header of every file says; all that a sidecar's says.

    Parameters
    ----------
    key : str
        The chunk's key.
    name : str or None
        The sidecar's name; None in a chunk's own file.
    parts : tuple of Part
        The tensors in the file, at least one, all of as many pieces: a chunk's layers, a sidecar's rows.
    """

    key: str
    name: str | None = None
    parts: tuple[Part, ...]

    @property
    def file_name(self) -> str:
        """Name of the file, unique in the store."""
        return file_name(self.key, self.name)

    @property
    def num_pieces(self) -> int:
        """Number of pieces of every tensor."""
        return len(self.parts[0].digests)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they are stored."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_by_rows(self) -> bool:
        """Whether a piece is a row of every tensor's first axis, so that rows can be read by themselves."""
        return all(part.shape and part.shape[0] == len(part.digests) for part in self.parts)

    def piece(self, number: int) -> str:
        """Return what a message calls a piece."""
        return f"layer {number}" if self.name is None else f"row {number} of its sidecar {self.name!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader(FileHeader):
    """What the header of a chunk's file says; a piece is a layer.

    Parameters
    ----------
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
        ``(layers, kv_heads, tokens, key_dim)`` of the keys.
    value_dim : int
        Width of the values, whose shape is the keys' besides.
    """

    identity: str
    text: str
    content: ContentHash
    token_ids: tuple[int, ...]
    position: int
    dtype: torch.dtype
    storage: str
    shape: tuple[int, int, int, int]
    value_dim: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.shape[2]


def chunk_header(file: TensorFile, key: str) -> ChunkHeader:
    """Return what the header of a chunk's file says.

    Parameters
    ----------
    file : TensorFile
        The verified file.
    key : str
        The chunk that it should hold.

    Raises
    ------
    ChunkDamagedError
        It is foreign, another chunk's, or its claims contradict each other.
    """
    try:
        if file.metadata["format"] != CHUNK_FORMAT:
            raise ChunkDamagedError(key, "it is not a chunk-KV file")
        header = _parse(file)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChunkDamagedError(key, f"its header cannot be understood ({error!r})") from error
    if header.key != key:
        raise ChunkDamagedError(key, f"the file holds another chunk, {header.key[:16]}")
    return header


def sidecar_header(file: TensorFile, key: str, name: str) -> FileHeader:
    """Return what the header of a sidecar says; takes and raises what ``chunk_header`` does."""
    if [file.metadata.get(field) for field in ("format", "key", "name")] != [SIDECAR_FORMAT, key, name]:
        raise ChunkDamagedError(key, f"its sidecar {name!r} is another one's")
    if len({len(part.digests) for part in file.parts}) != 1:
        raise ChunkDamagedError(key, f"the tensors of its sidecar {name!r} are not cut into equally many pieces")
    return FileHeader(key=key, name=name, parts=file.parts)


def _parse(file: TensorFile) -> ChunkHeader:
    about: dict[str, Any] = file.metadata
    layers, heads, tokens, dim = about["shape"]
    prefix, full, length = about["content"]
    header = ChunkHeader(
        key=check_text(about["key"]),
        parts=file.parts,
        identity=check_text(about["identity"]),
        text=check_text(about["text"]),
        content=ContentHash(check_natural(prefix), check_natural(full), check_natural(length)),
        token_ids=_naturals(about["token_ids"]),
        position=check_natural(about["position"]),
        dtype=COMPUTE_DTYPES[about["dtype"]],
        storage=about["storage"],
        shape=(_positive(layers), _positive(heads), _positive(tokens), _positive(dim)),
        value_dim=_positive(about.get("value_dim", dim)),
    )
    if header.storage not in STORAGE_DTYPES:
        raise ValueError(f"storage dtype {header.storage!r}")
    if len(header.token_ids) != tokens:
        raise ValueError(f"{len(header.token_ids)} token ids for {tokens} tokens")
    found = {part.name: (part.dtype, part.shape, len(part.digests)) for part in file.parts}
    if found != {name: (dtype, shape, layers) for name, (dtype, shape) in _layout(header).items()}:
        raise ValueError("its tensors are not those of a chunk's keys and values")
    return header


def _layout(header: ChunkHeader) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtypes and shapes of the tensors that a chunk of this shape has."""
    layers, heads, tokens, dim = header.shape
    of_values = (layers, heads, tokens, header.value_dim)
    if header.storage in COMPUTE_DTYPES:
        dtype = COMPUTE_DTYPES[header.storage]
        return {"k": (dtype, header.shape), "v": (dtype, of_values)}
    half, ahead = torch.float16, (layers, heads)
    if header.storage == "int8":
        return {
            "k": (torch.int8, header.shape),
            "k_scale": (half, (*ahead, 1, dim)),
            "v": (torch.int8, of_values),
            "v_scale": (half, (*ahead, tokens, 1)),
        }
    groups, across = -(-tokens // 32), -(-header.value_dim // 32)
    return {
        "k": (torch.uint8, (*ahead, dim, 16 * groups)),
        "k_scale": (half, (*ahead, dim, groups)),
        "k_least": (half, (*ahead, dim, groups)),
        "v": (torch.uint8, (*ahead, tokens, 16 * across)),
        "v_scale": (half, (*ahead, tokens, across)),
        "v_least": (half, (*ahead, tokens, across)),
    }


def _naturals(numbers: Any) -> tuple[int, ...]:
    # All at once: one by one it would take a third of the time that reading a header takes.
    found = tuple(numbers)
    if set(map(type, found)) - {int} or (found and min(found) < 0):
        raise ValueError("a token id is no natural number")
    return found


def _positive(number: Any) -> int:
    if check_natural(number) == 0:
        raise ValueError("a dimension is 0")
    return int(number)
