"""Ingestion in two passes: the plain KV of every chunk, then what similar chunks before it change."""

from __future__ import annotations

from .alternative_path import AlternativePath
from .anchors import AnchorBuilder
from .background import BackgroundWork, Preprocess
from .batches import PendingChunk, batches
from .context_prefill import BATCH_TOKENS as CONTEXT_BATCH_TOKENS
from .context_prefill import context_batches
from .corpus import CorpusPlanner
from .embedder import Embedder, SentenceEmbedder, as_embedder, unit_vectors
from .first_passes import first_passes_of
from .fixed_pieces import FixedPieces
from .grouping import group_tokens, similar_groups
from .neighbour_graph import Similarity
from .neighbour_index import NearestSearch, nearest
from .neighbours import GivenNeighbours
from .prefill import BATCH_TOKENS, Ingestor
from .prefill_cost import PrefillCost
from .preprocess import Preprocessor
from .preprocessing_plan import PreprocessingPlan, PreprocessingPlanner
from .progress import PassCounts, PreprocessingCounts, progress_bar
from .questions import questions_from_chunks, retriever_of
from .shift_prompts import BETWEEN_CHUNKS
from .variant_builder import PromptChunks, VariantBuilder
from .vectors import TEXTS_AT_ONCE, VECTORS_FILE, corpus_vectors, keep_vectors, unknown_texts

__all__ = [
    "BATCH_TOKENS",
    "BETWEEN_CHUNKS",
    "CONTEXT_BATCH_TOKENS",
    "TEXTS_AT_ONCE",
    "VECTORS_FILE",
    "AlternativePath",
    "AnchorBuilder",
    "BackgroundWork",
    "CorpusPlanner",
    "Embedder",
    "FixedPieces",
    "GivenNeighbours",
    "Ingestor",
    "NearestSearch",
    "PassCounts",
    "PendingChunk",
    "PrefillCost",
    "Preprocess",
    "PreprocessingCounts",
    "PreprocessingPlan",
    "PreprocessingPlanner",
    "Preprocessor",
    "PromptChunks",
    "SentenceEmbedder",
    "Similarity",
    "VariantBuilder",
    "as_embedder",
    "batches",
    "context_batches",
    "corpus_vectors",
    "first_passes_of",
    "group_tokens",
    "keep_vectors",
    "nearest",
    "progress_bar",
    "questions_from_chunks",
    "retriever_of",
    "similar_groups",
    "unit_vectors",
    "unknown_texts",
]
