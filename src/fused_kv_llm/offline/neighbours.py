"""Which chunks are similar to a chunk (FusionRAG section 3.1): those its questions will probably retrieve with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.chunk import chunk_text, chunk_texts
from fused_kv_llm.errors import ConfigError

from .embedder import Embedder, unit_vectors
from .neighbour_index import NeighbourIndex, nearest
from .vectors import corpus_vectors

__all__ = ["GivenNeighbours", "find_neighbours", "given_neighbours", "neighbours_by_vectors"]

GivenNeighbours = Mapping[str, Sequence[str]] | Callable[[str], Sequence[str]]
"""A caller's own graph: links between documents, co-retrieval counts, or a search of a vector store."""


def find_neighbours(
    texts: Sequence[str], corpus: Sequence[str], count: int, embedder: Embedder, vectors_path: Path | None
) -> dict[str, tuple[str, ...]]:
    """Find the most similar other chunks of every chunk, of a corpus that need not be stored.

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
    index = NeighbourIndex(count)
    index.update(list(corpus), lambda new: corpus_vectors(new, embedder, vectors_path))
    return {text: index.near(text).keys for text in texts}


def neighbours_by_vectors(
    vectors: Mapping[str, Sequence[float] | NDArray[np.float32]], texts: Sequence[str], count: int
) -> dict[str, tuple[str, ...]]:
    """Find the most similar other chunks by vectors that a search index has of them already.

    Parameters
    ----------
    vectors : mapping of str to sequence of float
        Text to vector, of any length and one number of dimensions.
    texts : sequence of str
        Chunks whose neighbours are wanted; those without a vector are left out.
    count : int
        Neighbours of each, fewer in a smaller corpus.

    Returns
    -------
    dict of str to tuple of str
        As :func:`find_neighbours` returns it, by the cosine.

    Raises
    ------
    ConfigError
        If the vectors do not have one number of dimensions.
    MissingExtraError
        If faiss is not installed.
    """
    by_text = {chunk_text(text): vector for text, vector in vectors.items()}
    keys = sorted(by_text)
    wanted = [text for text in dict.fromkeys(chunk_texts(texts)) if text in by_text]
    if not wanted:
        return {}
    if len(dimensions := {len(vector) for vector in by_text.values()}) > 1:
        raise ConfigError(f"vectors have {sorted(dimensions)} dimensions: give those of one embedder")
    units = unit_vectors(np.array([by_text[key] for key in keys], np.float32))
    row_of = {key: row for row, key in enumerate(keys)}
    rows = [row_of[text] for text in wanted]
    # A chunk finds itself too. Of equally near ones the first by its text counts, as in a corpus that is embedded.
    similarity, found = nearest(units, units[rows], min(count + 1, len(keys)))
    near = {}
    for text, row, scores, others in zip(wanted, rows, similarity.round(6).tolist(), found.tolist(), strict=True):
        ordered = sorted((-score, other) for score, other in zip(scores, others, strict=True) if other != row)
        near[text] = tuple(keys[other] for _, other in ordered[:count])
    return near


def given_neighbours(texts: Sequence[str], given: GivenNeighbours) -> dict[str, tuple[str, ...]]:
    """Ask a caller's own graph; texts that it does not know have no neighbours.

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
        others = dict.fromkeys(chunk_texts(answer))
        found[text] = tuple(other for other in others if other and other != text)
    return found
