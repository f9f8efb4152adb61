"""One model over one store: answering prompts from precomputed chunk KV."""

from __future__ import annotations

from .engine import FusedKVEngine
from .parts import Messages

__all__ = ["FusedKVEngine", "Messages"]
