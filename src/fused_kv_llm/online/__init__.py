"""One request: planning, loading, probing, fusion and generation."""

from __future__ import annotations

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
]
