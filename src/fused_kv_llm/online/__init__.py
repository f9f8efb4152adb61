"""One request: planning, loading, probing, fusion and generation."""

from __future__ import annotations

from .adaptive import Adaptive, round_ratios
from .chunk_opener import ChunkOpener
from .context import FusionContext, Recipe
from .found_chunks import MIN_REUSED_TOKENS, ChunkFinder
from .fused_prompt import FusedPrompt
from .fusion import Fusion, fuse
from .generation import AnswerWriter, FinishReason, Generation, Piece
from .kept_prompt import FusedRecipe, KeptPrompt, fused_recipe
from .load_ahead import STUCK_S, LayerRead, LoadAhead
from .loading_depth import MovingAverage, loading_depth, may_begin
from .planning import RequestPlanner, TakeKV
from .read_ahead import reader_threads
from .read_prompt import ReadPrompt
from .request import Request
from .request_loading import RequestLoading
from .selection import layer_scores, view_of
from .sharing import Sharing
from .variant_choice import VariantChoice

__all__ = [
    "MIN_REUSED_TOKENS",
    "STUCK_S",
    "Adaptive",
    "AnswerWriter",
    "ChunkFinder",
    "ChunkOpener",
    "FinishReason",
    "FusedPrompt",
    "FusedRecipe",
    "Fusion",
    "FusionContext",
    "Generation",
    "KeptPrompt",
    "LayerRead",
    "LoadAhead",
    "MovingAverage",
    "Piece",
    "ReadPrompt",
    "Recipe",
    "Request",
    "RequestLoading",
    "RequestPlanner",
    "Sharing",
    "TakeKV",
    "VariantChoice",
    "fuse",
    "fused_recipe",
    "layer_scores",
    "loading_depth",
    "may_begin",
    "reader_threads",
    "round_ratios",
    "view_of",
]
