"""Options of an engine and of one generation, checked where they enter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fused_kv_llm.errors import ConfigError

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "DEFAULT_NEIGHBOURS",
    "DEFAULT_PREPROCESSING",
    "DEFAULT_RATIO",
    "DEFAULT_SELECTOR",
    "GenerationConfig",
    "check_preprocessing",
    "check_ratio",
    "check_seed",
    "parse_bytes",
]

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)

_LOWEST_TEMPERATURE = 1e-3

DEFAULT_PREPROCESSING = "similar"
DEFAULT_NEIGHBOURS = 9
DEFAULT_RATIO = 0.15
DEFAULT_SELECTOR = "sink_attention"
DEFAULT_MEMORY_BYTES = 2 * 2**30


def check_ratio(ratio: float) -> float:
    """Return a recomputation ratio as a float.

    Raises
    ------
    ConfigError
        If it is not a number in [0, 1].
    """
    if not _is_number(ratio) or not 0.0 <= ratio <= 1.0:
        raise ConfigError(
            f"recompute_ratio={ratio!r} is not a number from 0 (reuse everything) to 1 (recompute everything)"
        )
    return float(ratio)


def check_preprocessing(preprocessing: str, num_neighbours: int) -> tuple[str, int]:
    """Return how chunks are preprocessed.

    Raises
    ------
    ConfigError
        If the name is unknown, or the number of neighbours is not a positive whole number.
    """
    if preprocessing not in ("similar", "none"):
        raise ConfigError(f"preprocessing={preprocessing!r} is unknown: use 'similar' or 'none'")
    if isinstance(num_neighbours, bool) or not isinstance(num_neighbours, int) or num_neighbours < 1:
        raise ConfigError(f"num_neighbours={num_neighbours!r} is not a whole number of at least 1")
    return preprocessing, num_neighbours


def check_seed(seed: int) -> int:
    """Return a seed.

    Raises
    ------
    ConfigError
        If it is not a whole number that torch takes.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How to choose the tokens of an answer.

    Parameters
    ----------
    max_tokens : int
        Tokens to generate at most, at least 1.
    temperature : float
        0 takes the most likely token every time; higher values sample.
    top_p : float
        Sampling considers the smallest set of tokens whose probability reaches this, in (0, 1].
    stop : tuple of str
        The answer ends before the first of these strings.
    seed : int or None
        Makes sampling repeatable.

    Raises
    ------
    ConfigError
        If a value cannot work.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens!r} is not a whole number of at least 1")
        # Below a thousandth float32 logits divided by the temperature overflow; the answer would be greedy anyway.
        if not _is_number(self.temperature) or not (
            self.temperature == 0.0 or _LOWEST_TEMPERATURE <= self.temperature < float("inf")
        ):
            raise ConfigError(
                f"temperature={self.temperature!r} is neither 0, which is greedy, nor a number from "
                f"{_LOWEST_TEMPERATURE:g} up; 1 is neutral"
            )
        if not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p!r} is not a number in (0, 1]: 1 considers every token")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop={self.stop!r} is not a list of non-empty strings")
        if self.seed is not None:
            check_seed(self.seed)

    @classmethod
    def create(
        cls,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] | str | None = (),
        seed: int | None = None,
    ) -> GenerationConfig:
        """Build a configuration from what callers pass: `stop` may be one string, a list or None."""
        if stop is not None and not isinstance(stop, Sequence):
            raise ConfigError(f"stop={stop!r} is not a list of non-empty strings")
        strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return cls(max_tokens, temperature, top_p, strings, seed)
