"""Ingestion: every chunk of a corpus is prefilled once."""

from __future__ import annotations

from .corpus import CorpusPlanner, Similarity
from .embedder import Embedder, SentenceEmbedder, as_embedder
from .neighbours import GivenNeighbours
from .preprocess import Ingestor

__all__ = [
    "CorpusPlanner",
    "Embedder",
    "GivenNeighbours",
    "Ingestor",
    "SentenceEmbedder",
    "Similarity",
    "as_embedder",
]
