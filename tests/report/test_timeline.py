"""The timeline of a request: its entries sum to the seconds of its stages, and begin when they began."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.report import FusionReport, StageTime

MOMENTS = st.lists(st.integers(0, 1000), min_size=4, max_size=12).map(sorted)


def sums(report: FusionReport) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in report.timeline:
        found[one.stage] = found.get(one.stage, 0.0) + one.end_s - one.start_s
    return found


@given(MOMENTS, st.integers(0, 1000), st.integers(0, 1000))
def test_entries_sum_to_the_seconds_whatever_a_part_turns_out_to_be(
    moments: list[int], begin: int, length: int
) -> None:
    report = FusionReport(called_s=0.0)
    for began, ended in zip(moments[::2], moments[1::2], strict=False):
        report.spend("fuse", began, ended)
    inside = [(max(one.start_s, begin), min(one.end_s, begin + length)) for one in report.timeline]
    part = sum(max(0.0, end - start) for start, end in inside)
    report.rename("fuse", "probe", begin, begin + length)
    entries = sums(report)
    assert entries.get("probe", 0.0) == part
    assert entries.get("fuse", 0.0) + part == sum(b - a for a, b in zip(moments[::2], moments[1::2], strict=False))
    assert all(one.start_s >= begin and one.end_s <= begin + length for one in report.timeline if one.stage == "probe")


def test_parts_that_follow_each_other_are_one_and_others_are_apart() -> None:
    report = FusionReport(called_s=10.0)
    for began_s, ended_s in ((10.1, 10.2), (10.2005, 10.3), (10.5, 10.6)):
        report.spend("fuse", began_s, ended_s)
    assert [(one.start_s, one.end_s) for one in report.timeline] == [
        pytest.approx((0.1, 0.3)),
        pytest.approx((0.5, 0.6)),
    ]
    assert report.seconds["fuse"] == pytest.approx(0.2995)


def test_what_was_done_before_the_question_was_asked_is_before_zero() -> None:
    report = FusionReport(called_s=5.0)
    report.spend("align", 5.0, 6.0)
    report.count_from(8.0)
    report.spend("fuse", 8.0, 9.0)
    assert report.timeline == [StageTime("align", -3.0, -2.0), StageTime("fuse", 0.0, 1.0)]
    plain = report.to_dict()
    assert plain["timeline"][0] == {"stage": "align", "start_s": -3.0, "end_s": -2.0}
    assert "called_s" not in plain
