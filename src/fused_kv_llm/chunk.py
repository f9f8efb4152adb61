"""What a chunk is, what its KV is, and when a stored KV is valid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from fused_kv_llm.errors import CorpusError

__all__ = ["FORMAT_VERSION", "ChunkKV", "ContentHash", "KVIdentity", "chunk_key", "chunk_text", "chunk_texts"]

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
        ``[layers, kv_heads, tokens, key_dim]`` and ``[layers, kv_heads, tokens, value_dim]``. Keys carry the rotation
        of the positions ``position, position + 1, ...``.
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
        What was done to the KV itself after the prefill; ``"none"`` for the plain KV, which is all that is stored. A
        context shift does not count: it is a sidecar, whose name says how it was made.
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


def chunk_text(text: str) -> str:
    """Return the canonical form of a chunk's text: without white space around it.

    Chunks are stored, looked up and found in prompts by it. Frameworks strip texts, or not, before they put them
    into prompts; what is inside a chunk stays as it is.

    Raises
    ------
    CorpusError
        If it is not text.
    """
    if not isinstance(text, str):
        raise CorpusError(f"A chunk is of type {type(text).__name__}, not text: pass strings or documents.")
    return text.strip()


def chunk_texts(texts: Iterable[str]) -> list[str]:
    """Return the canonical form of several chunks' texts.

    Raises
    ------
    CorpusError
        If one string was given, which would be read as one chunk a character, or a chunk is not text.
    """
    if isinstance(texts, str):
        raise CorpusError(f"texts={texts[:40]!r} is one string: pass a list of chunks, [text] for a single one.")
    return [chunk_text(text) for text in texts]


def chunk_key(identity_digest: str, token_ids: Sequence[int]) -> str:
    """Name a chunk's KV by its content.

    Parameters
    ----------
    identity_digest : str
        ``KVIdentity.digest``.
    token_ids : sequence of int
        The chunk's stand-alone token ids.

    Returns
    -------
    str
        SHA-256, hexadecimal.
    """
    digest = hashlib.sha256(identity_digest.encode())
    digest.update(b"|" + b",".join(str(int(i)).encode() for i in token_ids) + b";")
    return digest.hexdigest()
