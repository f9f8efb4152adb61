"""When the stages of a request began and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StageTime", "renamed", "with_stage"]

# Two parts of one stage with nothing but bookkeeping between them are shown as one.
_GAP_S = 0.002


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage of a request, or a part of it between others' steps.

    Parameters
    ----------
    stage : str
    start_s, end_s : float
        Seconds from the call on; below zero for what was done before it, while a search went on.
    """

    stage: str
    start_s: float
    end_s: float


def with_stage(timeline: Sequence[StageTime], new: StageTime) -> list[StageTime]:
    """Return a timeline with one more entry, or with its last one longer if that is the same stage."""
    if timeline and timeline[-1].stage == new.stage and new.start_s - timeline[-1].end_s < _GAP_S:
        return [*timeline[:-1], StageTime(new.stage, timeline[-1].start_s, new.end_s)]
    return [*timeline, new]


def renamed(timeline: Sequence[StageTime], old: str, new: StageTime) -> list[StageTime]:
    """Return a timeline in which a part of a stage turns out to be another one.

    Parameters
    ----------
    timeline : sequence of StageTime
    old : str
        What the stage is called so far.
    new : StageTime
        What its part from `start_s` to `end_s` is called from now on.
    """
    found = list[StageTime]()
    for one in timeline:
        start_s, end_s = max(one.start_s, new.start_s), min(one.end_s, new.end_s)
        if one.stage != old or start_s >= end_s:
            found.append(one)
            continue
        parts = (
            StageTime(old, one.start_s, start_s),
            StageTime(new.stage, start_s, end_s),
            StageTime(old, end_s, one.end_s),
        )
        found += [part for part in parts if part.end_s > part.start_s]
    return found
