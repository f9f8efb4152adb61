"""What a chunk is, what its KV is, and when a stored KV is valid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

__all__ = ["FORMAT_VERSION", "ChunkKV", "ContentHash", "KVIdentity", "chunk_key"]

FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class ContentHash:
    """Hashes by which a chunk's text is found inside a prompt.

    Parameters
    ----------
    prefix : int
        Unsigned 64-bit hash of the text's first characters (the content index's window).
    full : int
        Unsigned 64-bit hash of the whole text.
    length : int
        Length of the text in characters.
    """

    prefix: int
    full: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """Precomputed keys and values of one chunk.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[layers, kv_heads, tokens, head_dim]``. Keys carry the rotation of the positions
        ``position, position + 1, ...``.
    token_ids : tuple of int
        The chunk's stand-alone token ids.
    position : int
        The position at which the first token stood when the chunk was prefilled.
    """

    keys: torch.Tensor
    values: torch.Tensor
    token_ids: tuple[int, ...]
    position: int

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and the values."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """Everything besides the token ids on which a chunk's KV depends.

    Two KV with equal identity and equal token ids are interchangeable; a change of any field makes
    every stored chunk of the old identity a miss.

    Parameters
    ----------
    model : str
        Content fingerprint of the weights.
    tokenizer : str
        Content fingerprint of the tokenizer.
    dtype : str
        Compute dtype, for example ``"bfloat16"``.
    rope : str
        Digest of the rotary parameters.
    prefix : str
        Digest of the token ids that stood before the chunk when it was prefilled.
    preprocessing : str
        Preprocessing method and its parameters; ``"none"`` for plain prefill after the prefix.
    kv_dtype : str
        Storage dtype; ``"auto"`` stores the compute dtype.
    tenant : str
        Salt that separates tenants.
    format_version : int
        Version of the storage format.
    """

    model: str
    tokenizer: str
    dtype: str
    rope: str
    prefix: str
    preprocessing: str = "none"
    kv_dtype: str = "auto"
    tenant: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """SHA-256 over all fields, hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def chunk_key(identity_digest: str, token_ids: Sequence[int], context: Sequence[Sequence[int]] = ()) -> str:
    """Name a chunk's KV by its content.

    Parameters
    ----------
    identity_digest : str
        ``KVIdentity.digest``.
    token_ids : sequence of int
        The chunk's stand-alone token ids.
    context : sequence of sequences of int
        Token ids of each chunk that stood before it when it was prefilled, in order.

    Returns
    -------
    str
        SHA-256, hexadecimal.
    """
    digest = hashlib.sha256(identity_digest.encode())
    digest.update(b"|")
    for ids in (token_ids, *context):
        digest.update(b",".join(str(int(i)).encode() for i in ids))
        digest.update(b";")
    return digest.hexdigest()
