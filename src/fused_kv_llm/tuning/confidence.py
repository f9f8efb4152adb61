"""Confidence: how low the mean agreement of all questions may be, given that of those that were asked.

A question's agreement lies between 0 and 1, most of them at or near 1 and a few far below. Bounds that lean on a normal
distribution, and bootstraps, promise too much then: where none of twenty questions went wrong, they cannot imagine one
that does. The bound here assumes nothing but the range (Gaffke, *Three test statistics for a nonparametric one-sided
hypothesis on the mean of a nonnegative variable*, 2005; Learned-Miller and Thomas, *A new confidence interval for the
mean of a bounded random variable*, arXiv:1905.06208): the agreements and one more question with an agreement of 0 are
weighted at random, by a Dirichlet distribution with all parameters 1, and the bound is that quantile of the weighted
mean. With agreements of 0 and 1 only it is the one of Clopper and Pearson. That it holds at every sample size is proven
for two values and known of no exception otherwise; ``tests/tuning/test_confidence.py`` looks for one.

What the range alone allows is little: even if all answers agree, about 60 questions are needed to show 95 % with
a confidence of 95 %, and 30 for 90 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["lower_bound", "questions_needed", "upper_bound"]

_DRAWS = 10_000
_MOST_AT_ONCE = 4_000_000
_MOST_QUESTIONS = 100_000


def lower_bound(agreements: Sequence[float], confidence: float) -> float:
    """Return what the mean over all questions is at least, with a confidence.

    Parameters
    ----------
    agreements : sequence of float
        In [0, 1], of questions drawn at random; their order does not count.
    confidence : float
        In (0, 1): how often the bound is right.

    Returns
    -------
    float
        In [0, 1]; 0 without questions. The same for the same agreements: what is drawn depends on nothing else.
    """
    return _bound(agreements, confidence, 1.0)


def upper_bound(agreements: Sequence[float], confidence: float) -> float:
    """Return what the mean over all questions is at most, with a confidence; as :func:`lower_bound`."""
    return 1.0 - _bound([1.0 - agreement for agreement in agreements], confidence, 1.0)


def questions_needed(agreements: Sequence[float], target: float, confidence: float) -> int | None:
    """Return about how many questions would show that the mean reaches a target, if more went as these did.

    Parameters
    ----------
    agreements : sequence of float
        In [0, 1].
    target : float
        In (0, 1].
    confidence : float
        In (0, 1).

    Returns
    -------
    int or None
        Questions in all. None if no number would, since the mean of these does not exceed the target.
    """
    if not agreements or float(np.mean(agreements)) <= target:
        return None
    number = len(agreements)

    def is_shown(questions: int) -> bool:
        return _bound(agreements, confidence, questions / number) >= target

    enough = number
    while not is_shown(enough):
        enough *= 2
        if enough > _MOST_QUESTIONS:
            return None
    few = enough // 2 if enough > number else 0
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if is_shown(middle) else (middle, enough)
    return enough


def _bound(agreements: Sequence[float], confidence: float, times: float) -> float:
    """Return the bound as if every agreement had been seen so many times."""
    if not agreements:
        return 0.0
    values = np.sort(np.asarray(agreements, dtype=np.float64))
    number = len(values)
    if number * _DRAWS <= _MOST_AT_ONCE:
        means = _weights(number, times) @ values
    else:
        drawn, rows = np.random.default_rng(0), max(1, _MOST_AT_ONCE // number)
        means = np.concatenate([_drawn(drawn, number, times, rows) @ values for _ in range(-(-_DRAWS // rows))])
    return float(np.quantile(means, 1.0 - confidence))


@lru_cache(maxsize=1)
def _weights(number: int, times: float) -> NDArray[np.float64]:
    """Return the same draws for all ratios of a calibration, which have as many agreements."""
    return _drawn(np.random.default_rng(0), number, times, _DRAWS)


def _drawn(drawn: np.random.Generator, number: int, times: float, rows: int) -> NDArray[np.float64]:
    """Return Dirichlet weights ``[rows, number]``: gamma variates divided by their sum, that of the worst included."""
    weights = drawn.standard_gamma(times, (rows, number))
    weights /= weights.sum(1, keepdims=True) + drawn.standard_gamma(1.0, (rows, 1))
    return weights
