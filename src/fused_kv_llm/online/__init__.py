"""One request: planning, loading, probing, fusion and generation."""

from __future__ import annotations

from .catalog import ChunkCatalog
from .fusion import FusedPrompt, fuse
from .generation import FinishReason, Generation, Piece, decode
from .request import Placement, Request

__all__ = [
    "ChunkCatalog",
    "FinishReason",
    "FusedPrompt",
    "Generation",
    "Piece",
    "Placement",
    "Request",
    "decode",
    "fuse",
]
