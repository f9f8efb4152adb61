"""Which ratio a calibration chooses: the smallest that is shown to be good enough, and what would show a smaller one.

Several ratios are judged by the same questions, and the best looking of many is easily one that was lucky. So they are
tested in a fixed order, from the largest ratio downwards, each at the full level, and the first that is not shown ends
it (Maurer, Hothorn and Lehmacher 1995; as a way to set parameters by a bound on the mean: Angelopoulos et al., *Learn
then Test*, arXiv:2110.01052, section 4). The chance that any ratio is passed that falls short of the target is
then at most one minus the confidence. Several selectors share it equally (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from .confidence import lower_bound, questions_needed, upper_bound

__all__ = ["CalibrationPoint", "Choice", "NextQuestions", "choose"]

_FULL = 1.0


@dataclass(slots=True)
class CalibrationPoint:
    """One selector at one ratio.

    Parameters
    ----------
    selector : str
    ratio : float
    agreements : list of float
        Of every question: share of full prefill's answer tokens that this way would have chosen.
    ttft_s : list of float
        Seconds from the prompt to the first token's logits.
    """

    selector: str
    ratio: float
    agreements: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    @property
    def agreement(self) -> float:
        """Mean over the questions."""
        return fmean(self.agreements)

    @property
    def median_ttft_s(self) -> float:
        """Median seconds to the first token's logits."""
        return median(self.ttft_s)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return what the mean over all questions is at least and at most, each with a confidence."""
        if self.ratio >= _FULL:
            return 1.0, 1.0
        return lower_bound(self.agreements, confidence), upper_bound(self.agreements, confidence)


@dataclass(frozen=True, slots=True)
class NextQuestions:
    """What would have to be asked to show that a smaller ratio is good enough.

    Parameters
    ----------
    selector : str
    ratio : float
        The largest that was not shown.
    questions : int or None
        About how many questions more, if they go as those did that were asked; None if no number would be enough.
    """

    selector: str
    ratio: float
    questions: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Parameters
    ----------
    point : CalibrationPoint or None
        None if nothing but full prefill is shown to be good enough.
    bound : float
        What its agreement is at least; 1 for full prefill.
    level : float
        Confidence of each selector's bounds, by which all of them together have the confidence that was asked for.
    target : float
        The mean agreement that was asked for.
    waiting : tuple of CalibrationPoint
        Of each selector the largest ratio that was not shown, if it is smaller than the chosen one.
    """

    point: CalibrationPoint | None
    bound: float
    level: float
    target: float
    waiting: tuple[CalibrationPoint, ...]

    @property
    def next(self) -> NextQuestions | None:
        """What would have to be asked for a smaller ratio; None if the smallest of all was chosen."""
        found = []
        for point in self.waiting:
            needed = questions_needed(point.agreements, self.target, self.level)
            more = None if needed is None else max(1, needed - len(point.agreements))
            found.append(NextQuestions(point.selector, point.ratio, more))
        hopeful = [one for one in found if one.questions is not None]
        return min(hopeful or found, key=lambda one: (one.questions or 0, one.ratio), default=None)


def choose(points: Sequence[CalibrationPoint], target: float, confidence: float) -> Choice:
    """Choose the smallest ratio that is shown to reach a target.

    Parameters
    ----------
    points : sequence of CalibrationPoint
        Of one selector or several, in any order.
    target : float
        Mean agreement over all questions, in (0, 1].
    confidence : float
        In (0, 1).

    Returns
    -------
    Choice
        Of several selectors with the smallest ratio, that of the higher agreement.
    """
    chains: dict[str, list[CalibrationPoint]] = {}
    for point in points:
        chains.setdefault(point.selector, []).append(point)
    level = 1.0 - (1.0 - confidence) / max(1, len(chains))
    shown: list[tuple[CalibrationPoint, float]] = []
    stopped: list[CalibrationPoint] = []
    for chain in chains.values():
        for point in sorted(chain, key=lambda one: -one.ratio):
            bound = point.interval(level)[0]
            if bound < target:
                stopped.append(point)
                break
            shown.append((point, bound))
    best = min(shown, key=lambda one: (one[0].ratio, -one[0].agreement), default=None)
    if best is None:
        return Choice(None, 1.0, level, target, tuple(stopped))
    return Choice(*best, level, target, tuple(one for one in stopped if one.ratio < best[0].ratio))
