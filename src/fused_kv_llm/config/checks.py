"""Checks of an engine's options that pydantic does not have: each takes what was given and returns the value.

A value that cannot work is refused with a ``ConfigError`` that says what would.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationInfo

from fused_kv_llm.errors import ConfigError

from .values import check_ratio, is_number, is_whole, parse_bytes

__all__ = [
    "count",
    "most",
    "not_negative",
    "preprocessing",
    "prompts",
    "ratio",
    "seconds",
    "sharing",
    "size",
    "target",
    "variants",
]


def ratio(value: Any) -> Any:
    """Take a share of tokens, or the name of a way to choose one."""
    return value if value in ("auto", "adaptive") else check_ratio(value)


def target(value: Any) -> Any:
    """Take a positive number of nats."""
    if not is_number(value) or not value > 0:
        raise ConfigError(f"adaptive_target={value!r} is not a positive number of nats")
    return float(value)


def most(value: Any) -> Any:
    """Take a share of tokens that leaves some to be reused."""
    if not is_number(value) or not 0.0 < value < 1.0:
        raise ConfigError(f"adaptive_cap={value!r} is not between 0 and 1: recompute_ratio=1 recomputes everything")
    return float(value)


def size(value: Any, info: ValidationInfo) -> int | None:
    """Take bytes, or a text such as ``"2GiB"``; None stays."""
    return None if value is None else parse_bytes(value, info.field_name or "size")


def sharing(value: Any) -> Any:
    """Take a rule of sharing chunks' KV in memory."""
    if value not in ("auto", "always", "never"):
        raise ConfigError(f"share_chunk_kv={value!r} is unknown: use 'auto', 'always' or 'never'")
    return value


def preprocessing(value: Any) -> Any:
    """Take a way of preprocessing."""
    if value not in ("similar", "fusionrag", "none"):
        raise ConfigError(f"preprocessing={value!r} is unknown: use 'similar', 'fusionrag' or 'none'")
    return value


def prompts(value: Any) -> Any:
    """Take a number of prompts that chunks can be put into."""
    if not is_whole(value) or value not in (1, 2, 4):
        raise ConfigError(f"preprocessing_prompts={value!r} is none of 1, 2 and 4")
    return value


def count(value: Any, info: ValidationInfo) -> Any:
    """Take a whole number of at least 1; None stays."""
    if value is not None and (not is_whole(value) or value < 1):
        raise ConfigError(f"{info.field_name}={value!r} is not a whole number of at least 1")
    return value


def not_negative(value: Any, info: ValidationInfo) -> Any:
    """Take a whole number of at least 0."""
    if not is_whole(value) or value < 0:
        raise ConfigError(f"{info.field_name}={value!r} is not a whole number of at least 0")
    return value


def variants(value: Any, info: ValidationInfo) -> Any:
    """Take a number of variants, which preprocessing as FusionRAG has it leaves no use for."""
    if not_negative(value, info) and info.data.get("preprocessing") == "fusionrag":
        raise ConfigError(
            f"variants={value!r} and preprocessing='fusionrag' both say what is used in place of a chunk's own KV: "
            "take preprocessing='none' with variants, or variants=0"
        )
    return value


def seconds(value: Any, info: ValidationInfo) -> Any:
    """Take a positive number of seconds; None stays where it turns something off."""
    if value is None and info.field_name == "refresh_s":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigError(f"{info.field_name}={value!r} is not a positive number of seconds")
    return value
