"""What the index returns: rows of chunks, content hashes of many chunks, and totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fused_kv_llm.store.format import ChunkHeader

__all__ = ["ChunkRow", "ContentRows", "IdentityTotals"]


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """The index row of a chunk.

    Parameters
    ----------
    key : str
        The chunk's key.
    identity : str
        Digest of the identity for which the KV is valid.
    text : str
        The chunk's text.
    token_ids : tuple of int
        The chunk's stand-alone token ids.
    position : int
        Position of the first token when the chunk was prefilled.
    nbytes : int
        Size of the chunk's file.
    """

    key: str
    identity: str
    text: str
    token_ids: tuple[int, ...]
    position: int
    nbytes: int

    @classmethod
    def from_header(cls, header: ChunkHeader, nbytes: int) -> ChunkRow:
        """Return the row of a chunk by its file's header and size."""
        return cls(header.key, header.identity, header.text, header.token_ids, header.position, nbytes)


class ContentRows(NamedTuple):
    """Content hashes of many chunks, one entry per chunk, ascending by ``rowid``.

    Parameters
    ----------
    rowid : numpy.ndarray
        int64; grows with every chunk that is added to the store, and is never used again.
    prefix, full : numpy.ndarray
        uint64 hashes of the beginning and of the whole of the text.
    length : numpy.ndarray
        int64 length of the text in characters.
    """

    rowid: npt.NDArray[np.int64]
    prefix: npt.NDArray[np.uint64]
    full: npt.NDArray[np.uint64]
    length: npt.NDArray[np.int64]


class IdentityTotals(NamedTuple):
    """What a store holds of one identity.

    Parameters
    ----------
    identity : str
        ``KVIdentity.digest``.
    name : str
        Model, dtype and storage dtype, as given to ``KVStore.describe``; empty without.
    chunks, tokens, nbytes : int
        Chunks, their tokens, and the bytes of their files without sidecars.
    disk_chunks, disk_bytes, remote_chunks, remote_bytes : int
        Chunks and bytes by tier, sidecars included; a chunk can be in both.
    sidecars : dict of str to int
        Chunks that have a sidecar, by its name.
    """

    identity: str
    name: str
    chunks: int
    tokens: int
    nbytes: int
    disk_chunks: int
    disk_bytes: int
    remote_chunks: int
    remote_bytes: int
    sidecars: dict[str, int]
