"""Options of one generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fused_kv_llm.errors import ConfigError

from .values import check_seed, is_number, is_whole

__all__ = ["GenerationConfig"]

_LOWEST_TEMPERATURE = 1e-3
_MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How the tokens of an answer are chosen, and where the answer ends.

    Parameters
    ----------
    max_tokens : int
        Most tokens to generate, at least 1.
    temperature : float
        0 takes the most likely token every time; higher values sample.
    top_p : float
        Sampling considers the smallest set of tokens whose probability reaches this, in (0, 1].
    stop : tuple of str
        The answer ends before the first of these strings.
    seed : int or None
        Makes sampling repeatable.
    logprobs : int or None
        How many of the likeliest tokens are given with each token of the answer, and their logarithms of probability,
        at most 20; 0 gives that of the token alone, None nothing.

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
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.max_tokens) or self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens!r} is not a whole number of at least 1")
        # Below a thousandth float32 logits divided by the temperature overflow; the answer would be greedy anyway.
        if not is_number(self.temperature) or not (
            self.temperature == 0.0 or _LOWEST_TEMPERATURE <= self.temperature < float("inf")
        ):
            raise ConfigError(
                f"temperature={self.temperature!r} is neither 0, which is greedy, nor a number from "
                f"{_LOWEST_TEMPERATURE:g} up; 1 is neutral"
            )
        if not is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p={self.top_p!r} is not a number in (0, 1]: 1 considers every token")
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop={self.stop!r} is not a list of non-empty strings")
        if self.seed is not None:
            check_seed(self.seed)
        if self.logprobs is not None and not (is_whole(self.logprobs) and 0 <= self.logprobs <= _MOST_LOGPROBS):
            raise ConfigError(f"logprobs={self.logprobs!r} is not a whole number from 0 to {_MOST_LOGPROBS}, or None")

    @classmethod
    def create(
        cls,
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] | str | None = (),
        seed: int | None = None,
        logprobs: int | None = None,
    ) -> GenerationConfig:
        """Build a configuration from what callers pass: `stop` may be one string, a list or None."""
        if stop is not None and not isinstance(stop, Sequence):
            raise ConfigError(f"stop={stop!r} is not a list of non-empty strings")
        strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return cls(max_tokens, temperature, top_p, strings, seed, logprobs)
