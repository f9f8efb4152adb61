"""One request: planning, loading, probing, fusion and generation."""

from __future__ import annotations

from .context import FusionContext, Recipe
from .fusion import FusedPrompt, Fusion, fuse
from .generation import AnswerWriter, FinishReason, Generation, Piece
from .planning import RequestPlanner
from .read_ahead import reader_threads
from .request import Request
from .selection import layer_scores, view_of

__all__ = [
    "AnswerWriter",
    "FinishReason",
    "FusedPrompt",
    "Fusion",
    "FusionContext",
    "Generation",
    "Piece",
    "Recipe",
    "Request",
    "RequestPlanner",
    "fuse",
    "layer_scores",
    "reader_threads",
    "view_of",
]
