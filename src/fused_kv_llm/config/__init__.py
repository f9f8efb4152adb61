"""Options: those of an engine, those of one generation, and the checks of single values."""

from __future__ import annotations

from .engine import (
    DEFAULT_MEMORY,
    DEFAULT_MODEL,
    DEFAULT_NEIGHBOURS,
    DEFAULT_POLICY,
    DEFAULT_PREPROCESSING,
    DEFAULT_PREPROCESSING_PROMPTS,
    DEFAULT_RATIO,
    DEFAULT_SELECTOR,
    EngineConfig,
    option_of,
)
from .generation import GenerationConfig
from .option import Option
from .values import RecomputeRatio, check_ratio, check_seed, is_whole, parse_bytes

__all__ = [
    "DEFAULT_MEMORY",
    "DEFAULT_MODEL",
    "DEFAULT_NEIGHBOURS",
    "DEFAULT_POLICY",
    "DEFAULT_PREPROCESSING",
    "DEFAULT_PREPROCESSING_PROMPTS",
    "DEFAULT_RATIO",
    "DEFAULT_SELECTOR",
    "EngineConfig",
    "GenerationConfig",
    "Option",
    "RecomputeRatio",
    "check_ratio",
    "check_seed",
    "is_whole",
    "option_of",
    "parse_bytes",
]
