"""Similar chunks by the vectors of a framework's search index, which then need not be embedded again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.chunk import chunk_texts
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import ConfigError, CorpusError, FusedKVWarning
from fused_kv_llm.offline import GivenNeighbours, neighbours_by_vectors

__all__ = ["IndexVectors", "Neighbours", "faiss_vectors", "given_by"]

Neighbours = GivenNeighbours | Literal["index"]
"""A caller's own graph, or ``"index"``: what the vectors of the index that is ingested say."""

IndexVectors = Mapping[str, Sequence[float] | NDArray[np.float32]]
"""Texts to their vectors."""


def faiss_vectors(index: Any) -> NDArray[np.float32]:
    """Return the vectors of a FAISS index in the order in which they were added, ``[vectors, dimensions]`` float32.

    Raises
    ------
    CorpusError
        If the index is of a kind that may not keep them.
    """
    import faiss

    # Asked for vectors that it does not keep, FAISS ends the process.
    if not isinstance(index, (faiss.IndexFlat, faiss.IndexHNSWFlat, faiss.IndexIVFFlat)):
        raise CorpusError(
            f"neighbours='index': vectors of an index of kind {type(index).__name__} cannot be read, only those of a "
            "flat, HNSW or IVF index of whole vectors; leave neighbours out to have the chunks embedded"
        )
    vectors: NDArray[np.float32] = index.reconstruct_n(0, index.ntotal)
    return vectors


def given_by(
    neighbours: Neighbours | None, vectors: Callable[[], IndexVectors], texts: Sequence[str], engine: FusedKVEngine
) -> GivenNeighbours | None:
    """Return what an engine takes as neighbours of texts that are ingested.

    FusionRAG (section 3.1) looks for the chunks that questions will retrieve together: the vectors by which they are
    retrieved say that best.

    Parameters
    ----------
    neighbours : mapping, callable, "index" or None
    vectors : callable
        Returns those of all chunks of the index; asked for ``"index"``.
    texts : sequence of str
    engine : FusedKVEngine

    Raises
    ------
    ConfigError
        If `neighbours` is another string, or vectors do not have one number of dimensions.
    CorpusError
        If the index has no vector of any of the texts.
    MissingExtraError
        If faiss is not installed.

    Warns
    -----
    FusedKVWarning
        If it has none of some of them: these get no neighbours.
    """
    if not isinstance(neighbours, str):
        return neighbours
    if neighbours != "index":
        raise ConfigError(f"neighbours={neighbours!r} is unknown: give 'index', a mapping, a callable or None")
    known, wanted = vectors(), set(chunk_texts(texts))
    near = neighbours_by_vectors(known, texts, engine.config.neighbours)
    if wanted and not near:
        raise CorpusError(
            f"neighbours='index': the index has {len(known)} vectors, but none of these {len(wanted)} chunks; leave "
            "neighbours out to have them embedded"
        )
    if without := len(wanted - near.keys()):
        warnings.warn(
            f"neighbours='index': {without} of {len(wanted)} chunks have no vector in the index. They are stored, but "
            "not preprocessed. Add them to the index, or leave neighbours out.",
            FusedKVWarning,
            stacklevel=3,
        )
    return near
