"""Which chunks are similar to a chunk (FusionRAG section 3.1): those its questions will probably retrieve with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.errors import ConfigError, MissingExtraError

from .embedder import Embedder
from .vectors import corpus_vectors

__all__ = ["GivenNeighbours", "find_neighbours", "given_neighbours"]

GivenNeighbours = Mapping[str, Sequence[str]] | Callable[[str], Sequence[str]]
"""A caller's own graph: links between documents, co-retrieval counts, or a search of a vector store."""


def find_neighbours(
    texts: Sequence[str], corpus: Sequence[str], count: int, embedder: Embedder, vectors_path: Path | None
) -> dict[str, tuple[str, ...]]:
    """Find the most similar other chunks of every chunk.

    Parameters
    ----------
    texts : sequence of str
        Chunks of the corpus whose neighbours are wanted.
    corpus : sequence of str
        All chunks, distinct.
    count : int
        Neighbours of each, fewer in a smaller corpus.
    embedder : Embedder
    vectors_path : Path or None
        Where vectors are remembered.

    Returns
    -------
    dict of str to tuple of str
        Most similar first; equal similarity goes by the text, so that the corpus' order does not count.

    Raises
    ------
    MissingExtraError
        If faiss or the embedder's packages are not installed.
    """
    ordered = sorted(corpus)
    count = min(count, len(ordered) - 1)
    if count <= 0:
        return dict.fromkeys(texts, ())
    vectors = corpus_vectors(ordered, embedder, vectors_path)
    row_of = {text: row for row, text in enumerate(ordered)}
    rows = np.array([row_of[text] for text in texts])
    similarity, nearest = _search(vectors, vectors[rows], count + 1)
    found: dict[str, tuple[str, ...]] = {}
    for text, row, scores, candidates in zip(texts, rows, similarity, nearest, strict=True):
        others = [(-float(score), int(other)) for score, other in zip(scores, candidates, strict=True) if other != row]
        found[text] = tuple(ordered[other] for _, other in sorted(others)[:count])
    return found


def given_neighbours(texts: Sequence[str], given: GivenNeighbours, count: int) -> dict[str, tuple[str, ...]]:
    """Ask a caller's own graph.

    Raises
    ------
    ConfigError
        If it answers with something other than texts.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        answer: Any = given.get(text, ()) if isinstance(given, Mapping) else given(text)
        if isinstance(answer, str) or not all(isinstance(other, str) for other in answer):
            raise ConfigError(f"neighbours of {text[:40]!r} are {answer!r:.80}: give a list of texts")
        others = dict.fromkeys(other.strip() for other in answer)
        found[text] = tuple(other for other in others if other and other != text)[:count]
    return found


def _search(
    vectors: NDArray[np.float32], queries: NDArray[np.float32], count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "similar") from error
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    similarity, nearest = index.search(queries, count)
    return similarity, nearest
