"""What is asked, and when: the same for every system that is compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Asked", "Trace", "poisson", "zipf"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One question.

    Parameters
    ----------
    chunks : tuple of int
        In the order of the prompt.
    question_tokens, answer_tokens : int
        Prompt tokens that are in no chunk; tokens of the answer.
    at_s : float
        When it comes, after the beginning.
    ratio : float or None
        Its own recomputation ratio; None for the engine's.
    """

    chunks: tuple[int, ...]
    question_tokens: int
    answer_tokens: int
    at_s: float = 0.0
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Questions in the order in which they come, and the tokens of every chunk that there is.

    Parameters
    ----------
    asked : sequence of Asked
    chunk_tokens : sequence of int
    """

    asked: Sequence[Asked]
    chunk_tokens: Sequence[int]

    def prompt_tokens(self, asked: Asked) -> int:
        """Return a prompt's length."""
        return asked.question_tokens + sum(self.chunk_tokens[chunk] for chunk in asked.chunks)


def poisson(count: int, rate_per_s: float, seed: int = 0) -> list[float]:
    """Return moments of a Poisson process, the first at 0."""
    drawn, at_s, moments = random.Random(seed), 0.0, []
    for _ in range(count):
        moments.append(at_s)
        at_s += drawn.expovariate(rate_per_s)
    return moments


def zipf(
    exponent: float,
    chunks: int,
    requests: int,
    rate_per_s: float,
    k: int = 10,
    seed: int = 1,
    question_tokens: int = 64,
    answer_tokens: int = 128,
) -> Trace:
    """Return questions with `k` different chunks of 256 to 1,024 tokens; popularity and length are independent."""
    drawn = random.Random(seed)
    tokens = [int(256 * 4 ** drawn.random()) for _ in range(chunks)]
    weights = [1 / (rank + 1) ** exponent for rank in range(chunks)]
    places = list(range(chunks))
    # What is popular is not what was stored first.
    drawn.shuffle(places)
    asked = []
    for at_s in poisson(requests, rate_per_s, seed):
        chosen: dict[int, None] = {}
        while len(chosen) < min(k, chunks):
            chosen.update(dict.fromkeys(drawn.choices(places, weights=weights, k=k)))
        asked.append(Asked(tuple(chosen)[:k], question_tokens, answer_tokens, at_s))
    return Trace(asked, tokens)
