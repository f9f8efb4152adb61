"""Why chunks were reused, or were not: one verdict for each, with what helps."""

from __future__ import annotations

from .judge import Judge, JudgedPrompt
from .remedies import remedy_of
from .seen import SeenChunks

__all__ = ["Judge", "JudgedPrompt", "SeenChunks", "remedy_of"]
