"""Ingestion in two passes: the plain KV of every chunk, then what similar chunks before it change."""

from __future__ import annotations

from .alternative_path import AlternativePath
from .anchors import AnchorBuilder
from .background import BackgroundWork, Preprocess, PreprocessingCounts
from .corpus import CorpusPlanner
from .embedder import Embedder, SentenceEmbedder, as_embedder
from .neighbour_graph import Similarity
from .neighbours import GivenNeighbours
from .prefill import Ingestor
from .prefill_cost import PrefillCost
from .preprocess import Preprocessor
from .questions import questions_from_chunks, retriever_of
from .variant_builder import PromptChunks, VariantBuilder
from .vectors import corpus_vectors

__all__ = [
    "AlternativePath",
    "AnchorBuilder",
    "BackgroundWork",
    "CorpusPlanner",
    "Embedder",
    "GivenNeighbours",
    "Ingestor",
    "PrefillCost",
    "Preprocess",
    "PreprocessingCounts",
    "Preprocessor",
    "PromptChunks",
    "SentenceEmbedder",
    "Similarity",
    "VariantBuilder",
    "as_embedder",
    "corpus_vectors",
    "questions_from_chunks",
    "retriever_of",
]
