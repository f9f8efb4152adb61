"""Ratios are tested from the largest downwards, and the first that is not shown ends it."""

from __future__ import annotations

from fused_kv_llm.tuning.calibration_choice import CalibrationPoint, choose
from fused_kv_llm.tuning.confidence import lower_bound

GOOD, FAIR, BAD = [1.0] * 60, [0.97, 0.98] * 10 + [1.0] * 20, [0.5] * 60


def points(name: str, **by_ratio: list[float]) -> list[CalibrationPoint]:
    return [CalibrationPoint(name, int(ratio[1:]) / 100, values) for ratio, values in by_ratio.items()]


def test_the_smallest_ratio_of_the_chain_is_chosen() -> None:
    choice = choose(points("one", r0=BAD, r15=GOOD, r30=GOOD, r50=GOOD), 0.9, 0.95)
    assert choice.point is not None
    assert choice.point.ratio == 0.15
    assert choice.bound == lower_bound(GOOD, 0.95) >= 0.9
    assert choice.next is not None
    assert (choice.next.ratio, choice.next.questions) == (0.0, None), "its mean is below the target"


def test_nothing_below_a_ratio_that_is_not_shown_is_taken() -> None:
    """However good it looks: of many that are looked at, one is lucky."""
    choice = choose(points("one", r0=GOOD, r15=GOOD, r30=BAD, r50=GOOD), 0.9, 0.95)
    assert choice.point is not None
    assert choice.point.ratio == 0.5


def test_where_none_is_shown_the_questions_that_are_wanting_are_told() -> None:
    choice = choose(points("one", r0=BAD, r15=FAIR, r50=FAIR), 0.96, 0.95)
    assert choice.point is None
    assert choice.bound == 1.0
    assert choice.next is not None
    assert choice.next.ratio == 0.5
    more = choice.next.questions
    assert more is not None
    # So many, if they go as those did, are enough, and a quarter less is not.
    assert lower_bound(FAIR * (1 + -(-more // len(FAIR))), 0.95) >= 0.96
    assert lower_bound(FAIR * int(0.75 * more / len(FAIR)), 0.95) < 0.96


def test_several_selectors_share_the_confidence() -> None:
    both = [*points("one", r15=GOOD), *points("other", r0=BAD, r5=GOOD)]
    choice = choose(both, 0.9, 0.95)
    assert choice.level == 0.975
    assert choice.point is not None
    assert (choice.point.selector, choice.point.ratio) == ("other", 0.05)
    assert choice.bound == lower_bound(GOOD, 0.975)
    # Shown alone, not beside another: 40 answers that all agree are enough for 92 % at 95 %, not at 97.5 %.
    alone = points("one", r15=[1.0] * 40)
    assert choose(alone, 0.92, 0.95).point is not None
    assert choose([*alone, *points("other", r15=BAD)], 0.92, 0.95).point is None


def test_full_prefill_needs_no_questions() -> None:
    choice = choose([CalibrationPoint("one", 1.0, [1.0]), CalibrationPoint("one", 0.5, [1.0])], 0.95, 0.95)
    assert choice.point is not None
    assert (choice.point.ratio, choice.bound) == (1.0, 1.0)
    assert choice.next is not None
    assert choice.next.questions is not None
    assert 50 <= choice.next.questions <= 65
