"""Calibration: how much has to be recomputed on this corpus so that answers stay those of full prefill.

The model answers questions greedily with full prefill; then, for every selector and ratio, its choices are compared
token by token along that same answer. The smallest ratio whose agreement is shown to reach the target is kept for
``recompute_ratio="auto"``: see :mod:`.confidence` for the bound and :mod:`.calibration_choice` for the order of tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from fused_kv_llm.config import DEFAULT_SELECTOR, check_ratio
from fused_kv_llm.engine import Calibration, FusedKVEngine
from fused_kv_llm.errors import ConfigError, CorpusError
from fused_kv_llm.selectors import resolve_selector

from .calibration_choice import CalibrationPoint, Choice, choose
from .calibration_prompts import CalibrationPrompts, agreement, leaving_nothing
from .written_questions import MadeQuestions

__all__ = ["RATIOS", "CalibrationResult", "calibrate", "check_calibration"]

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The curve, and what was chosen from it.

    Parameters
    ----------
    points : list of CalibrationPoint
    full_ttft_s : float
        Median seconds of full prefill.
    chosen : Calibration
    choice : Choice
        Why: its bound, its level, and what would have to be asked for a smaller ratio.
    made : MadeQuestions or None
        How the questions came about; None where they were given.
    """

    points: list[CalibrationPoint]
    full_ttft_s: float
    chosen: Calibration
    choice: Choice
    made: MadeQuestions | None

    @property
    def advice(self) -> str:
        """What would show that a smaller ratio is good enough; empty if there is none."""
        following, asked = self.choice.next, self.chosen.questions
        if following is None:
            return ""
        way = f"{following.ratio:g} with {following.selector}"
        if following.questions is None:
            return (
                f"More questions would not help for a smaller ratio: with {way} the mean itself is not above "
                f"{self.chosen.target_agreement:.1%}."
            )
        return (
            f"{asked} questions do not show that {way} is good enough. If more go as these did, about "
            f"{following.questions} more questions would."
        )


def check_calibration(
    questions: Sequence[str] | None,
    target_agreement: float,
    selectors: Sequence[str],
    ratios: Sequence[float] = RATIOS,
    confidence: float = 0.95,
) -> None:
    """Refuse what :func:`calibrate` could not use, before a model is loaded or runs.

    Raises
    ------
    CorpusError
        If no questions are given, or one that is empty or no text.
    ConfigError
        If the target or the confidence is out of range, a selector is unknown, a ratio is outside [0, 1], or there are
        none.
    """
    if not isinstance(target_agreement, (int, float)) or not 0.0 < target_agreement <= 1.0:
        raise ConfigError(f"target_agreement={target_agreement!r} is outside (0, 1]: 0.9 is a good start")
    if not isinstance(confidence, (int, float)) or not 0.0 < confidence < 1.0:
        raise ConfigError(f"confidence={confidence!r} is outside (0, 1): 0.95 is a good start")
    if isinstance(selectors, str) or not selectors:
        raise ConfigError(f"selectors={selectors!r} is not a list of names: try [{DEFAULT_SELECTOR!r}]")
    for name in selectors:
        # The name is what recompute_ratio="auto" finds the selector by.
        if not isinstance(name, str):
            raise ConfigError(f"selectors contains {name!r}: give names of selectors")
        resolve_selector(name)
    if not ratios:
        raise ConfigError("ratios is empty: give ratios in [0, 1], 0 among them")
    for ratio in ratios:
        check_ratio(ratio)
    if isinstance(questions, str):
        raise CorpusError(f"questions={questions[:40]!r} is one string: give a list of questions")
    for number, question in enumerate(questions or (), start=1):
        if not isinstance(question, str) or not question.strip():
            raise CorpusError(f"Question {number} of {len(questions or ())} is {question!r}: give texts, none empty")
    if questions is not None and not questions:
        raise CorpusError("No questions were given: leave them out to have some made from the chunks.")


def calibrate(
    engine: FusedKVEngine,
    questions: Sequence[str] | None = None,
    *,
    target_agreement: float = 0.9,
    confidence: float = 0.95,
    selectors: Sequence[str] = (DEFAULT_SELECTOR,),
    ratios: Sequence[float] = RATIOS,
    num_questions: int = 100,
    num_chunks: int = 5,
    answer_tokens: int = 16,
    written: bool = True,
    track: Callable[[Sequence[tuple[str, str]]], Iterable[tuple[str, str]]] = iter,
) -> CalibrationResult:
    """Find the smallest ratio whose answers agree with full prefill's, and keep it beside the store.

    Parameters
    ----------
    engine : FusedKVEngine
        Its store holds the corpus. Only chunks of its tenant are used, and only it finds the calibration.
    questions : sequence of str or None
        Asked of the corpus, a random sample of what users ask; None makes them from the chunks. One that is given twice
        counts once.
    target_agreement : float
        Share of full prefill's greedy tokens to be met, in (0, 1].
    confidence : float
        In (0, 1): how sure it is that all questions of this kind, not only those asked, meet the target on average.
    selectors : sequence of str
    ratios : sequence of float
    num_questions : int
        Questions to make where none are given.
    num_chunks : int
        Chunks in a prompt.
    answer_tokens : int
        Tokens of an answer that are compared.
    written : bool
        Whether the model writes the questions that are made; otherwise they quote sentences of the chunks.
    track : callable
        Wraps the questions, for a progress bar.

    Anchors that a selector asks for and the store lacks are stored first.

    Returns
    -------
    CalibrationResult

    Raises
    ------
    StoreUnavailableError, StoreFullError
        If anchors are missing and cannot be stored.
    CorpusError
        If the store holds nothing of this model to ask about, or a question is empty.
    ConfigError
        If another option cannot work.
    """
    check_calibration(questions, target_agreement, selectors, ratios, confidence)
    distinct = None if questions is None else list(dict.fromkeys(questions))
    names = list(dict.fromkeys(selectors))
    with leaving_nothing(engine):
        prompts = CalibrationPrompts(engine, distinct, num_questions, num_chunks, answer_tokens, written=written)
        for name in names:
            # Without them another rule would be measured than the one that is asked for.
            engine.build_anchors(prompts.chunks, selector=name, progress=False)
        points = [CalibrationPoint(name, ratio) for name in names for ratio in sorted(set(ratios))]
        full_s: list[float] = []
        for question, source in track(prompts.asked):
            prompt, answer = prompts.answered(question, source)
            full_s.append(prompts.choices(prompt, answer, 1.0, names[0])[2])
            for point in points:
                chosen, _, seconds = prompts.choices(prompt, answer, point.ratio, point.selector)
                point.agreements.append(agreement(chosen, answer))
                point.ttft_s.append(seconds)
    choice = choose(points, target_agreement, confidence)
    selector = names[0] if choice.point is None else choice.point.selector
    found = Calibration(
        engine.fusion_identity,
        1.0 if choice.point is None else choice.point.ratio,
        selector,
        1.0 if choice.point is None else choice.point.agreement,
        target_agreement,
        len(prompts.asked),
        agreement_bound=choice.bound,
        confidence=confidence,
        asked=prompts.description,
        made_on=engine.corpus_state(resolve_selector(selector)),
    )
    found.save(engine.store.kv_dir)
    return CalibrationResult(points, median(full_s), found, choice, prompts.made)
