"""Ingestion: every chunk of a corpus is prefilled once."""

from __future__ import annotations

from fused_kv_llm.offline.anchors import AnchorBuilder
from fused_kv_llm.offline.background import BackgroundIngestor
from fused_kv_llm.offline.questions import questions_from_chunks, retriever_of

from .corpus import CorpusPlanner, Similarity
from .embedder import Embedder, SentenceEmbedder, as_embedder
from .neighbours import GivenNeighbours
from .preprocess import Ingestor

__all__ = [
    "AnchorBuilder",
    "BackgroundIngestor",
    "CorpusPlanner",
    "Embedder",
    "GivenNeighbours",
    "Ingestor",
    "SentenceEmbedder",
    "Similarity",
    "as_embedder",
    "questions_from_chunks",
    "retriever_of",
]
