"""One tensor of a file: where its pieces are, and whether a piece that was read is what was written."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import xxhash

from fused_kv_llm.store.format.cipher import TAG_NBYTES, FileCipher

__all__ = ["DTYPES", "Part", "byte_view"]

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
"""The dtypes that tensors can have, by safetensors' names."""


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a file, cut along its first axis into pieces of equal size.

    Parameters
    ----------
    name : str
        The tensor's.
    dtype : torch.dtype
    shape : tuple of int
    start : int
        Offset of its first byte in the file.
    digests : tuple of str
        xxh3-64 of each piece, sixteen hexadecimal digits; empty strings in an encrypted file.
    cipher : FileCipher or None
        Decrypts and authenticates the pieces of an encrypted file.
    message : int
        Number of its first piece among the file's encrypted messages.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    digests: tuple[str, ...]
    cipher: FileCipher | None = None
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
    def stored_piece_nbytes(self) -> int:
        """Bytes that one piece takes in the file, its tag included."""
        return self.piece_nbytes + (TAG_NBYTES if self.cipher is not None else 0)

    @property
    def stored_nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.stored_piece_nbytes * len(self.digests)

    def verify(self, piece: int, stored: memoryview, plain: memoryview) -> bool:
        """Verify a piece that was read from the file.

        Parameters
        ----------
        piece : int
            Its number.
        stored : memoryview
            Its bytes as they are in the file.
        plain : memoryview
            Receives the decrypted bytes of a piece of an encrypted file; otherwise the same memory as `stored`.

        Returns
        -------
        bool
            False if the piece is damaged or was altered.
        """
        if self.cipher is not None:
            return self.cipher.open_into(self.message + piece, stored, plain)
        return xxhash.xxh3_64_hexdigest(stored) == self.digests[piece]
