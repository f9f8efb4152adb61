"""How one store writes and reads its files: a chunk's KV, and sidecars; encrypted, if the store has a key."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from fused_kv_llm.chunk import FORMAT_VERSION, ChunkKV, ContentHash
from fused_kv_llm.errors import ConfigError, StoreUnavailableError
from fused_kv_llm.store.format.cipher import Cipher
from fused_kv_llm.store.format.header import (
    CHUNK_FORMAT,
    COMPUTE_DTYPES,
    SIDECAR_FORMAT,
    ChunkHeader,
    FileHeader,
    chunk_header,
    sidecar_header,
)
from fused_kv_llm.store.format.names import check_name
from fused_kv_llm.store.format.part import DTYPES
from fused_kv_llm.store.format.quantize import compress
from fused_kv_llm.store.format.tensor_encoder import encode_tensors
from fused_kv_llm.store.format.tensor_file import TensorFile, read_tensor_file

__all__ = ["FileCodec"]

_DTYPE_NAMES = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}


class FileCodec:
    """Encodes and decodes the files of one store.

    Parameters
    ----------
    cipher : Cipher or None
        Encrypts everything in a file but keys, names and identity.
    """

    def __init__(self, cipher: Cipher | None) -> None:
        self._cipher = cipher

    @property
    def is_encrypted(self) -> bool:
        """Whether files are encrypted."""
        return self._cipher is not None

    def encode_chunk(
        self, key: str, identity: str, text: str, content: ContentHash, kv: ChunkKV, kv_dtype: str = "auto"
    ) -> list[memoryview]:
        """Lay out a chunk's file in memory, without copying tensors that are stored as they are and on the CPU.

        Parameters
        ----------
        key, identity, text : str
            The chunk's key, the digest of its identity, and its text.
        content : ContentHash
            Hashes of the text.
        kv : ChunkKV
            Keys and values, float32, float16 or bfloat16, on any device.
        kv_dtype : str
            Dtype to store them in; ``"auto"`` keeps theirs.

        Returns
        -------
        list of memoryview
            The bytes of the file, in order.

        Raises
        ------
        ConfigError
            The text, hashes, keys, values, token ids or position cannot be stored or do not fit together.
        """
        _check_content(identity, text, content)
        _check_kv(kv)
        dtype = _DTYPE_NAMES[kv.keys.dtype]
        storage = dtype if kv_dtype == "auto" else kv_dtype
        tensors = compress(kv.keys.detach(), kv.values.detach(), storage)
        public = {"format": CHUNK_FORMAT, "format_version": str(FORMAT_VERSION), "key": key, "identity": identity}
        private = {
            "text": text,
            "content": [content.prefix, content.full, content.length],
            "token_ids": [int(i) for i in kv.token_ids],
            "position": kv.position,
            "dtype": dtype,
            "storage": storage,
            "shape": list(kv.keys.shape),
            "value_dim": kv.values.shape[3],
        }
        return encode_tensors(public, private, tensors, kv.keys.shape[0], self._cipher)

    def encode_sidecar(
        self, key: str, name: str, tensors: Mapping[str, torch.Tensor], *, by_rows: bool = False
    ) -> list[memoryview]:
        """Lay out a sidecar in memory.

        Parameters
        ----------
        key : str
            The chunk.
        name : str
            The sidecar's.
        tensors : mapping of str to torch.Tensor
            Floating point, integer or boolean, any shape, any device.
        by_rows : bool
            Whether every row of the tensors' first axes, all equally long, has a checksum of its own.

        Returns
        -------
        list of memoryview
            The bytes of the file, in order.

        Raises
        ------
        ConfigError
            There is no tensor, one cannot be stored, or the name cannot be used.
        """
        if not tensors or not all(isinstance(tensor_name, str) and tensor_name for tensor_name in tensors):
            raise ConfigError(f"The sidecar {name!r} of chunk {key[:16]} needs at least one tensor, each with a name.")
        for tensor_name, tensor in tensors.items():
            if tensor.dtype not in DTYPES.values():
                raise ConfigError(f"Tensor {tensor_name!r} is of dtype {tensor.dtype}; use one of {', '.join(DTYPES)}.")
        rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors.values()} if by_rows else {None}
        if len(rows) > 1 or 0 in rows:
            raise ConfigError(
                f"The tensors of the sidecar {name!r} have different numbers of rows: {sorted(map(str, rows))}."
            )
        version = str(FORMAT_VERSION)
        public = {"format": SIDECAR_FORMAT, "format_version": version, "key": key, "name": check_name(name)}
        return encode_tensors(public, {}, tensors, rows.pop(), self._cipher)

    def read_header(self, fd: int, key: str, name: str | None, file_nbytes: int) -> FileHeader:
        """Read and verify the header of an open file, a chunk's or a sidecar's.

        Parameters
        ----------
        fd : int
            The file, open for reading.
        key : str
            The chunk that the file should hold, or belong to.
        name : str or None
            The sidecar that it should hold; None for a chunk's own file.
        file_nbytes : int
            The file's actual size.

        Returns
        -------
        FileHeader
            The header, a ``ChunkHeader`` for a chunk; its tensors fill the file exactly.

        Raises
        ------
        ChunkDamagedError
            The file is truncated, altered, foreign, of another format version, or another chunk's or sidecar's.
        ChunkKeyError
            It was not written with the store's encryption key.
        OSError
            The file cannot be read.
        """
        file = self.read(fd, key, file_nbytes)
        return chunk_header(file, key) if name is None else sidecar_header(file, key, name)

    def read_chunk_header(self, fd: int, key: str, file_nbytes: int) -> ChunkHeader:
        """Read and verify the header of a chunk's open file, as ``read_header`` does."""
        return chunk_header(self.read(fd, key, file_nbytes), key)

    def read(self, fd: int, key: str, file_nbytes: int) -> TensorFile:
        """Read and verify the header of an open file, whatever chunk or sidecar it is of, as ``read_header`` does."""
        return read_tensor_file(fd, key, file_nbytes, self._cipher)


def _check_content(identity: str, text: str, content: ContentHash) -> None:
    if not isinstance(identity, str) or not isinstance(text, str):
        raise ConfigError(
            "identity (KVIdentity.digest) and text must be str, "
            f"not {type(identity).__name__} and {type(text).__name__}."
        )
    if not (0 <= content.prefix < 1 << 64 and 0 <= content.full < 1 << 64 and content.length >= 0):
        raise ConfigError(f"Content hashes are unsigned 64-bit numbers and a length, not {content}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"The chunk's text is not valid Unicode: {error}. Clean it first.") from error


def _check_kv(kv: ChunkKV) -> None:
    keys, values, ids = kv.keys, kv.values, kv.token_ids
    fits = keys.dim() == values.dim() == 4 and keys.shape[:3] == values.shape[:3]
    if not fits or keys.numel() == 0 or values.numel() == 0:
        raise ConfigError(
            "Keys and values must be [layers, kv_heads, tokens, width], alike but for the width, and not empty, "
            f"not {list(keys.shape)} and {list(values.shape)}."
        )
    if keys.dtype not in _DTYPE_NAMES or keys.dtype != values.dtype:
        raise ConfigError(
            "Keys and values must share one dtype of float32, float16 and bfloat16, "
            f"not {keys.dtype} and {values.dtype}."
        )
    if len(ids) != keys.shape[2]:
        raise ConfigError(f"{len(ids)} token ids were given for a KV of {keys.shape[2]} tokens.")
    if min(ids) < 0 or max(ids) >= 1 << 31:
        raise ConfigError(f"Token ids must be in [0, 2**31), not {min(ids)}..{max(ids)}.")
    if kv.position < 0:
        raise ConfigError(f"A chunk's position must be 0 or more, not {kv.position}.")
    if sys.byteorder != "little":
        raise StoreUnavailableError("Chunk KV are stored little endian; a big-endian machine cannot use them.")
