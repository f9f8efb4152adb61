"""Settings found by measurement: ratios, profiles of layers and anchors; the plain baseline; ways side by side."""

from __future__ import annotations

from fused_kv_llm.tuning.alpha_profile import AlphaProfile, profile_alpha
from fused_kv_llm.tuning.anchor_profile import AnchorProfile, profile_anchors
from fused_kv_llm.tuning.baseline import full_prefill
from fused_kv_llm.tuning.calibration import CalibrationResult, calibrate, check_calibration
from fused_kv_llm.tuning.calibration_choice import CalibrationPoint
from fused_kv_llm.tuning.layer_profile import profile_layers, read_span_samples
from fused_kv_llm.tuning.side_by_side import ComparedAnswer, SideBySide, Way
from fused_kv_llm.tuning.written_questions import MadeQuestions

__all__ = [
    "AlphaProfile",
    "AnchorProfile",
    "CalibrationPoint",
    "CalibrationResult",
    "ComparedAnswer",
    "MadeQuestions",
    "SideBySide",
    "Way",
    "calibrate",
    "check_calibration",
    "full_prefill",
    "profile_alpha",
    "profile_anchors",
    "profile_layers",
    "read_span_samples",
]
