"""Settings found by measurement: calibrated ratios, layer profiles, and the plain baseline."""

from __future__ import annotations

from fused_kv_llm.tuning.baseline import full_prefill
from fused_kv_llm.tuning.calibration import CalibrationResult, calibrate, check_calibration
from fused_kv_llm.tuning.layer_profile import profile_layers, read_span_samples

__all__ = [
    "CalibrationResult",
    "calibrate",
    "check_calibration",
    "full_prefill",
    "profile_layers",
    "read_span_samples",
]
