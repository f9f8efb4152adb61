"""Options of an engine and of one generation, checked where they enter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fused_kv_llm.errors import ConfigError

__all__ = ["DEFAULT_MEMORY_BYTES", "DEFAULT_RATIO", "DEFAULT_SELECTOR", "GenerationConfig", "check_ratio"]

DEFAULT_RATIO = 0.15
DEFAULT_SELECTOR = "all_layers"
DEFAULT_MEMORY_BYTES = 2 * 2**30


def check_ratio(ratio: float) -> float:
    """Return a recomputation ratio as a float.

    Raises
    ------
    ConfigError
        If it is not a number in [0, 1].
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0.0 <= ratio <= 1.0:
        raise ConfigError(
            f"recompute_ratio={ratio!r} is not a number from 0 (reuse everything) to 1 (recompute everything)"
        )
    return float(ratio)


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
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature!r} is negative or not finite: 0 is greedy, 1 is neutral")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p!r} is outside (0, 1]: 1 considers every token")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop={self.stop!r} is not a list of non-empty strings")

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
        strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return cls(max_tokens, temperature, top_p, strings, seed)
