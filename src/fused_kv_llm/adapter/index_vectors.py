"""The vectors that a framework's search index has of its chunks: the engine need not embed these again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.chunk import chunk_text, chunk_texts
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.offline import VECTORS_FILE, as_embedder, keep_vectors, unit_vectors, unknown_texts

__all__ = ["IndexVectors", "faiss_vectors", "keep_index_vectors"]

IndexVectors = Mapping[str, Sequence[float] | NDArray[np.float32] | None]
"""Texts to their vectors."""


def keep_index_vectors(
    engine: FusedKVEngine, texts: Sequence[str], embedding: Any, vectors: Callable[[], IndexVectors]
) -> None:
    """Remember the vectors of an index, if the engine's own embedder made them; others are left alone.

    Parameters
    ----------
    engine : FusedKVEngine
        Looks for similar chunks by its embedder.
    texts : sequence of str
        Chunks that are about to be ingested.
    embedding : object
        What embeds texts for the index; None if that is not known.
    vectors : callable
        Returns the vectors of the index; called if they are of use.
    """
    config = engine.config
    if config.preprocessing == "none" or not _are_the_same(config.embedder, embedding):
        return
    embedder, path = as_embedder(config.embedder), engine.store.kv_dir / VECTORS_FILE
    wanted = set(unknown_texts(chunk_texts(dict.fromkeys(texts)), embedder, path, tenant=config.tenant))
    if not wanted:
        return
    given = {text: vector for one, vector in vectors().items() if (text := chunk_text(one)) in wanted}
    found = {text: np.asarray(vector, np.float32) for text, vector in given.items() if vector is not None}
    # Of a text whose vector says nothing, the embedder is asked.
    sound = {text: vector for text, vector in found.items() if np.isfinite(vector).all() and vector.any()}
    if len({vector.shape for vector in sound.values()}) == 1:
        units = unit_vectors(np.stack(list(sound.values())))
        keep_vectors(list(sound), units, embedder, path, tenant=config.tenant)


def _are_the_same(own: Any, embedding: Any) -> bool:
    """Return whether an engine's embedder is that of an index, by what they are or by the name of their model."""
    if embedding is None:
        return False
    if embedding is own:
        return True
    try:
        name = as_embedder(embedding).name
    except ConfigError:
        # It embeds in a way of its own, which the engine's embedder cannot.
        return False
    return name == as_embedder(own).name and name not in ("unknown", type(embedding).__name__)


def faiss_vectors(index: Any, rows: Sequence[int]) -> NDArray[np.float32] | None:
    """Return vectors of a FAISS index, ``[rows, dimensions]`` float32, by the order in which they were added.

    None if it is of a kind that may not keep them, or does not have so many: asked for what it does not have, FAISS
    ends the process.
    """
    import faiss

    if not isinstance(index, (faiss.IndexFlat, faiss.IndexHNSWFlat)) or not rows or max(rows) >= index.ntotal:
        return None
    vectors: NDArray[np.float32] = index.reconstruct_batch(np.array(rows, np.int64))
    return vectors
