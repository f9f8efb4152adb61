"""Why chunks were reused, or were not: one verdict for each, with what helps."""

from __future__ import annotations

from .judge import Judge, JudgedPrompt
from .remedies import verdict_of
from .seen import SeenChunks

__all__ = ["Judge", "JudgedPrompt", "SeenChunks", "verdict_of"]
