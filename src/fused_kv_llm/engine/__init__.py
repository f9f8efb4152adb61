"""One model over one store: answering prompts from precomputed chunk KV."""

from __future__ import annotations

from fused_kv_llm.engine.calibration import Calibration, calibration_path

from .corpus_state import CorpusState
from .engine import FusedKVEngine
from .requests import Messages
from .speculation import Speculation

__all__ = [
    "Calibration",
    "CorpusState",
    "FusedKVEngine",
    "Messages",
    "Speculation",
    "calibration_path",
]
