"""The bound on a mean agreement: what it is in cases that can be worked out, and how often it is right."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from scipy.stats import beta

from fused_kv_llm.tuning.calibration_choice import CalibrationPoint, choose
from fused_kv_llm.tuning.confidence import lower_bound, questions_needed, upper_bound

TARGET, CONFIDENCE, CORPORA, QUESTIONS = 0.9, 0.95, 150, 40


@pytest.mark.parametrize(("right", "number"), [(20, 20), (59, 59), (17, 20), (90, 100), (1, 5)])
def test_with_two_values_it_is_clopper_and_pearsons(right: int, number: int) -> None:
    agreements = [1.0] * right + [0.0] * (number - right)
    want = beta.ppf(1 - CONFIDENCE, right, number - right + 1)
    assert lower_bound(agreements, CONFIDENCE) == pytest.approx(want, abs=0.006)


def test_it_stands_between_nothing_and_the_mean_and_rises_with_questions() -> None:
    assert lower_bound([], CONFIDENCE) == 0.0
    few, more = [0.9, 1.0, 0.75] * 5, [0.9, 1.0, 0.75] * 20
    assert 0.5 < lower_bound(few, CONFIDENCE) < lower_bound(more, CONFIDENCE) < fmean(more)
    assert lower_bound(few, 0.99) < lower_bound(few, 0.9)
    assert fmean(more) < upper_bound(more, CONFIDENCE) < upper_bound(few, CONFIDENCE) < 1.0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.randoms())
def test_the_order_of_questions_does_not_count(agreements: list[float], drawn: object) -> None:
    mixed = list(agreements)
    drawn.shuffle(mixed)  # type: ignore[attr-defined]
    assert lower_bound(mixed, CONFIDENCE) == lower_bound(agreements, CONFIDENCE) <= fmean(agreements) + 1e-9


def test_the_number_of_questions_that_would_be_enough() -> None:
    assert questions_needed([1.0] * 20, 0.95, CONFIDENCE) == pytest.approx(59, abs=3)
    assert questions_needed([1.0] * 20, 0.9, CONFIDENCE) == pytest.approx(29, abs=2)
    assert questions_needed([0.9] * 50, 0.95, CONFIDENCE) is None, "the mean is below the target"
    assert questions_needed([], 0.9, CONFIDENCE) is None
    agreements = [1.0, 0.9, 0.95, 0.85] * 5
    needed = questions_needed(agreements, 0.9, CONFIDENCE)
    assert needed is not None
    times = -(-needed // len(agreements))
    assert lower_bound(agreements * (times + 1), CONFIDENCE) >= 0.9 > lower_bound(agreements * (times - 1), CONFIDENCE)


def _fails_at_times(drawn: Generator, mean: float) -> np.ndarray:
    """Most answers agree, and some do not at all: what few questions do not show."""
    return (drawn.random(QUESTIONS) < mean).astype(float)


def _varies(drawn: Generator, mean: float) -> np.ndarray:
    """Of 16 tokens, with easy questions and hard ones."""
    return drawn.binomial(16, drawn.beta(8 * mean, 8 * (1 - mean), QUESTIONS)) / 16


def _falls_far(drawn: Generator, mean: float) -> np.ndarray:
    """Nearly all answers agree but for a token; one in fifty is lost."""
    lost = 0.02
    rest = mean / (1 - lost)
    return np.where(drawn.random(QUESTIONS) < lost, 0.0, drawn.binomial(16, rest, QUESTIONS) / 16)


@pytest.mark.parametrize("kind", [_fails_at_times, _varies, _falls_far])
def test_a_chosen_ratio_falls_short_of_the_target_in_one_corpus_of_twenty(
    kind: Callable[[Generator, float], np.ndarray],
) -> None:
    """The hardest case: every ratio of two selectors is just not good enough, so whatever is chosen is a mistake."""
    drawn = np.random.default_rng(7)
    mistakes = lucky = 0
    for _ in range(CORPORA):
        points = [
            CalibrationPoint(name, ratio, list(kind(drawn, TARGET - 0.001)))
            for name in ("one", "other")
            for ratio in (0.0, 0.05, 0.15, 0.3, 0.5)
        ]
        mistakes += choose(points, TARGET, CONFIDENCE).point is not None
        lucky += any(point.agreement >= TARGET for point in points)
    # 5 % of 150 are 7.5; a binomial count is above 13 once in fifty times.
    assert mistakes <= 13
    assert lucky > 0.9 * CORPORA, "by the mean nearly all would be mistakes"


def test_a_bootstrap_would_promise_too_much() -> None:
    drawn = np.random.default_rng(11)
    corpora = [_falls_far(drawn, TARGET - 0.001) for _ in range(CORPORA)]
    lowest = [np.quantile(drawn.choice(one, (500, QUESTIONS)).mean(1), 0.05) for one in corpora]
    assert sum(low >= TARGET for low in lowest) > 0.15 * CORPORA
    assert sum(lower_bound(list(one), CONFIDENCE) >= TARGET for one in corpora) <= 0.05 * CORPORA


def test_a_ratio_that_is_good_enough_is_found() -> None:
    drawn = np.random.default_rng(3)
    found = [
        choose([CalibrationPoint("one", 0.15, list(_varies(drawn, 0.99)))], TARGET, CONFIDENCE).point is not None
        for _ in range(50)
    ]
    assert sum(found) > 40
