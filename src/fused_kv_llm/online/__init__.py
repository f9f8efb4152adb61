"""One request: planning, loading, probing, fusion and generation."""

from __future__ import annotations

from .context import FusionContext, Recipe
from .fusion import FusedPrompt, Fusion, fuse
from .generation import FinishReason, Generation, Piece, PieceStream, decode
from .planning import RequestPlanner
from .read_ahead import reader_threads
from .request import Request
from .selection import layer_scores, view_of

__all__ = [
    "FinishReason",
    "FusedPrompt",
    "Fusion",
    "FusionContext",
    "Generation",
    "Piece",
    "PieceStream",
    "Recipe",
    "Request",
    "RequestPlanner",
    "decode",
    "fuse",
    "layer_scores",
    "reader_threads",
    "view_of",
]
