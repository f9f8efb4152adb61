"""One model over one store: answering prompts from precomputed chunk KV."""

from __future__ import annotations

from fused_kv_llm.engine.calibration import Calibration, calibration_path

from .corpus import similarity_of
from .corpus_state import CorpusState
from .engine import FusedKVEngine
from .parts import EngineParts, open_parts
from .requests import Messages
from .speculation import Speculation

__all__ = [
    "Calibration",
    "CorpusState",
    "EngineParts",
    "FusedKVEngine",
    "Messages",
    "Speculation",
    "calibration_path",
    "open_parts",
    "similarity_of",
]
