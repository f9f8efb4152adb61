"""One request: planning, loading, probing, fusion and generation."""

from __future__ import annotations

from fused_kv_llm.online.read_ahead import reader_threads
from fused_kv_llm.online.selection import layer_scores, view_of

from .fusion import FusedPrompt, fuse
from .generation import FinishReason, Generation, Piece, decode
from .planning import RequestPlanner
from .request import Placement, Request

__all__ = [
    "FinishReason",
    "FusedPrompt",
    "Generation",
    "Piece",
    "Placement",
    "Request",
    "RequestPlanner",
    "decode",
    "fuse",
    "layer_scores",
    "reader_threads",
    "view_of",
]
