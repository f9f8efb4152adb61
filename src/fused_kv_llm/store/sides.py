"""Side files: small tensors that belong to a chunk and are read without its KV.

A selector's artefacts of the offline stage go here, QCFuse's anchors for example: about a tenth of a chunk's KV,
needed for every chunk of a request while most of their KV is still on its way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from fused_kv_llm.chunk import FORMAT_VERSION
from fused_kv_llm.errors import ChunkDamagedError, ConfigError
from fused_kv_llm.store.cipher import Cipher
from fused_kv_llm.store.layout import StoreFolder, check_name
from fused_kv_llm.store.pieces import read_pieces
from fused_kv_llm.store.tensor_file import DTYPES, byte_view, encode_tensors, read_tensor_file

__all__ = ["SIDE_FORMAT", "encode_side", "read_side"]

SIDE_FORMAT = "fused_kv_llm.side"


def encode_side(key: str, name: str, tensors: Mapping[str, torch.Tensor], cipher: Cipher | None) -> list[memoryview]:
    """Lay out a side file in memory.

    Parameters
    ----------
    key : str
        The chunk.
    name : str
        The side file's.
    tensors : mapping of str to torch.Tensor
        Floating point, integer or boolean, any shape.
    cipher : Cipher or None
        Encrypts the tensors and their names.

    Raises
    ------
    ConfigError
        There is no tensor, or one cannot be stored.
    """
    if not tensors or not all(isinstance(tensor_name, str) and tensor_name for tensor_name in tensors):
        raise ConfigError(f"The side file {name!r} of chunk {key[:16]} needs at least one tensor, each with a name.")
    for tensor_name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise ConfigError(f"Tensor {tensor_name!r} is of dtype {tensor.dtype}; use one of {', '.join(DTYPES)}.")
    public = {"format": SIDE_FORMAT, "format_version": str(FORMAT_VERSION), "key": key, "name": check_name(name)}
    return encode_tensors(public, {}, tensors, None, cipher)


def read_side(folder: StoreFolder, key: str, name: str, cipher: Cipher | None) -> dict[str, torch.Tensor]:
    """Read and verify a side file.

    Raises
    ------
    ChunkDamagedError
        It is truncated, altered, foreign, or another one's.
    FileNotFoundError, OSError
        There is none, or it cannot be read.
    """
    fd = folder.open_chunk(key, name)
    try:
        file = read_tensor_file(fd, key, os.fstat(fd).st_size, str(FORMAT_VERSION), cipher)
        if [file.metadata.get(field) for field in ("format", "key", "name")] != [SIDE_FORMAT, key, name]:
            raise ChunkDamagedError(key, f"its side file {name!r} is another one's")
        tensors = {}
        for part in file.parts:
            tensor = torch.empty(part.shape, dtype=part.dtype)
            try:
                damaged = read_pieces(fd, part, file.cipher, 0, len(part.digests), byte_view(tensor))
            except EOFError as error:
                raise ChunkDamagedError(key, f"its side file {name!r} was shortened") from error
            if damaged:
                raise ChunkDamagedError(key, f"the checksum of {part.name!r} in its side file {name!r} does not match")
            tensors[part.name] = tensor
        return tensors
    finally:
        os.close(fd)
