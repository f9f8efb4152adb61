"""One request: planning, loading, probing, fusion and generation."""

from __future__ import annotations

from .fusion import FusedPrompt, fuse
from .generation import Constraint, FinishReason, Generation, Piece, decode, end_token_ids
from .planning import RequestPlanner
from .request import Placement, Request

__all__ = [
    "Constraint",
    "FinishReason",
    "FusedPrompt",
    "Generation",
    "Piece",
    "Placement",
    "Request",
    "RequestPlanner",
    "decode",
    "end_token_ids",
    "fuse",
]
