"""Checks of single values; each raises an error that names the option and says what it takes."""

from __future__ import annotations

import re
from typing import Literal

from fused_kv_llm.errors import ConfigError

__all__ = ["RecomputeRatio", "check_ratio", "check_seed", "is_number", "is_whole", "parse_bytes"]

RecomputeRatio = float | Literal["auto", "adaptive"]
"""A share of the chunks' tokens, the calibrated one, or as much as an answer seems to need."""

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float; a bool is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Return whether a value is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_ratio(ratio: float) -> float:
    """Return a recomputation ratio as a float.

    Raises
    ------
    ConfigError
        If it is not a number in [0, 1].
    """
    if not is_number(ratio) or not 0.0 <= ratio <= 1.0:
        raise ConfigError(
            f"recompute_ratio={ratio!r} is not a number from 0 (reuse everything) to 1 (recompute everything)"
        )
    return float(ratio)


def check_seed(seed: int) -> int:
    """Return a seed.

    Raises
    ------
    ConfigError
        If it is not a whole number that torch takes.
    """
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed!r} is not a whole number from 0 to 2**63 - 1")
    return seed


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Return a number of bytes.

    Parameters
    ----------
    size : int or str
        ``20_000_000_000``, ``"20GB"`` (powers of 1000), ``"20GiB"`` (powers of 1024), ``"1.5 TB"``, ``"512"``.
    name : str
        The option, for messages.

    Raises
    ------
    ConfigError
        If it is not a size, or negative.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f'{name}={size!r} is not a size: use bytes, or a text such as "20GB" or "512MiB"')
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2].lower()])
