"""Which chunks are similar to a chunk (FusionRAG section 3.1): those its questions will probably retrieve with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fused_kv_llm.chunk import chunk_texts
from fused_kv_llm.errors import ConfigError

from .embedder import Embedder
from .neighbour_index import NeighbourIndex
from .vectors import corpus_vectors

__all__ = ["GivenNeighbours", "find_neighbours", "given_neighbours"]

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
