"""Settings found by measurement: calibrated ratios and layer profiles; the plain baseline; ways side by side."""

from __future__ import annotations

from fused_kv_llm.tuning.baseline import full_prefill
from fused_kv_llm.tuning.calibration import CalibrationResult, calibrate, check_calibration
from fused_kv_llm.tuning.layer_profile import profile_layers, read_span_samples
from fused_kv_llm.tuning.side_by_side import ComparedAnswer, SideBySide, Way

__all__ = [
    "CalibrationResult",
    "ComparedAnswer",
    "SideBySide",
    "Way",
    "calibrate",
    "check_calibration",
    "full_prefill",
    "profile_layers",
    "read_span_samples",
]
