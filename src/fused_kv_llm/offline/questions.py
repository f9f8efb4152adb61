"""Makes questions from a corpus where a caller has none, and finds the chunks for a question."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .embedder import SentenceEmbedder, as_embedder
from .vectors import corpus_vectors

__all__ = ["questions_from_chunks", "retriever_of"]

_WORDS_ASKED = 10


def questions_from_chunks(chunks: Sequence[str], count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Make questions from the corpus itself: what does it say after these words?

    Parameters
    ----------
    chunks : sequence of str
    count : int
        Questions at most, one a chunk.
    seed : int

    Returns
    -------
    list of (str, str)
        Question, and the chunk it was made from.
    """
    drawn = random.Random(seed)
    found = []
    for chunk in drawn.sample(list(chunks), len(chunks)):
        sentences = [s for s in re.split(r"(?<=[.!?])\s+", chunk) if len(s.split()) > _WORDS_ASKED]
        if sentences:
            words = drawn.choice(sentences).split()
            found.append((f'How does this go on: "{" ".join(words[:_WORDS_ASKED])} ..."?', chunk))
        if len(found) == count:
            break
    return found


def retriever_of(
    chunks: Sequence[str], kv_dir: Path, *, embedder: Any | None = None, tenant: str = ""
) -> Callable[[str, int], list[str]]:
    """Return what finds the chunks nearest to a question.

    Parameters
    ----------
    chunks : sequence of str
    kv_dir : Path
        Where vectors are remembered.
    embedder : object or None
        What :func:`.as_embedder` takes; None is the default embedder.
    tenant : str
        Vectors are remembered for each tenant apart.

    Returns
    -------
    callable
        Question and count to so many chunks, nearest first.
    """
    used = SentenceEmbedder() if embedder is None else as_embedder(embedder)
    vectors = corpus_vectors(chunks, used, kv_dir / "vectors.sqlite", tenant=tenant)

    def retrieve(question: str, count: int) -> list[str]:
        similarity = vectors @ used.encode([question])[0]
        return [chunks[i] for i in np.argsort(-similarity, kind="stable")[:count].tolist()]

    return retrieve
