"""The scale of Cache-Craft's overhead: alpha* = argmin E[CFO_alpha], subject to a quality that is asked for (eq. 13).

``CFO_alpha`` grows with alpha, so alpha* is the smallest one that is good enough on questions of the corpus. Quality is
measured as :mod:`.calibration` does, by agreement with full prefill's greedy tokens; the paper takes the F1 of answers.
Here too an alpha has to be shown to be good enough: from the largest downwards, each at the full level, see
:mod:`.calibration_choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from fused_kv_llm.engine import Calibration, FusedKVEngine
from fused_kv_llm.errors import ConfigError, CorpusError
from fused_kv_llm.selectors import CacheCraft

from .calibration import check_calibration
from .calibration_prompts import CalibrationPrompts, agreement, leaving_nothing
from .confidence import lower_bound

__all__ = ["ALPHAS", "AlphaPoint", "AlphaProfile", "profile_alpha"]

ALPHAS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
_MOST = 0.999
"""Ratio of the requests: CFO says how much is recomputed, and 1 would be full prefill."""


@dataclass(slots=True)
class AlphaPoint:
    """One alpha.

    Parameters
    ----------
    alpha : float
    agreements : list of float
        Of every question: share of full prefill's answer tokens that would have been chosen.
    overheads : list of float
        CFO of every chunk of every question.
    """

    alpha: float
    agreements: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)

    @property
    def agreement(self) -> float:
        """Mean over the questions."""
        return fmean(self.agreements)

    @property
    def mean_overhead(self) -> float:
        """``E[CFO_alpha]``."""
        return fmean(self.overheads) if self.overheads else 0.0


@dataclass(frozen=True, slots=True)
class AlphaProfile:
    """What a profile found.

    Parameters
    ----------
    points : list of AlphaPoint
        Ascending.
    chosen : Calibration
        Kept for ``recompute_ratio="auto"``: full prefill if no alpha is shown to be good enough.
    """

    points: list[AlphaPoint]
    chosen: Calibration


def profile_alpha(
    engine: FusedKVEngine,
    questions: Sequence[str] | None = None,
    *,
    target_agreement: float = 0.9,
    confidence: float = 0.95,
    alphas: Sequence[float] = ALPHAS,
    num_questions: int = 100,
    num_chunks: int = 5,
    answer_tokens: int = 16,
    track: Callable[[Sequence[tuple[str, str]]], Iterable[tuple[str, str]]] = iter,
) -> AlphaProfile:
    """Find alpha* and keep it beside the store, with ``cache_craft`` as the selector.

    Parameters
    ----------
    engine : FusedKVEngine
        Its store holds the corpus, and variants of chunks that earlier prompts have left; it keeps no new ones
        meanwhile, behind which these questions would cost nothing.
    alphas : sequence of float
        Positive.
    questions, target_agreement, confidence, num_questions, num_chunks, answer_tokens, track
        As :func:`.calibrate` takes them.

    Raises
    ------
    CorpusError
        If the store holds nothing to ask about, or no variants; or a question is empty.
    ConfigError
        If the engine uses no variants, or another option cannot work.
    """
    check_calibration(questions, target_agreement, (CacheCraft.name,), confidence=confidence)
    if not alphas or any(isinstance(a, bool) or not isinstance(a, (int, float)) or not a > 0 for a in alphas):
        raise ConfigError(f"alphas={alphas!r} is not a list of positive numbers: leave it out to try {ALPHAS}")
    if engine.corpus.variants is None:
        raise ConfigError("variants=0 has no records for cache_craft to go by: open the engine with variants=3")
    if engine.corpus.variants.usage()[0] == 0:
        raise CorpusError("The store holds no variant of a chunk yet: answer questions with variants=3 first.")
    distinct = None if questions is None else list(dict.fromkeys(questions))
    points = [AlphaPoint(float(alpha)) for alpha in sorted(set(alphas))]
    with leaving_nothing(engine):
        prompts = CalibrationPrompts(engine, distinct, num_questions, num_chunks, answer_tokens)
        for question, source in track(prompts.asked):
            prompt, answer = prompts.answered(question, source)
            for point in points:
                chosen, report, _ = prompts.choices(prompt, answer, _MOST, CacheCraft(point.alpha))
                point.agreements.append(agreement(chosen, answer))
                point.overheads += [one["overhead"] for one in report.variants]
    best, bound = _choose(points, target_agreement, confidence)
    found = Calibration(
        engine.fusion_identity,
        1.0 if best is None else _MOST,
        CacheCraft.name,
        1.0 if best is None else best.agreement,
        target_agreement,
        len(prompts.asked),
        alpha=None if best is None else best.alpha,
        agreement_bound=bound,
        confidence=confidence,
        asked=prompts.description,
        made_on=engine.corpus_state(CacheCraft() if best is None else CacheCraft(alpha=best.alpha)),
    )
    found.save(engine.store.kv_dir)
    return AlphaProfile(points, found)


def _choose(points: Sequence[AlphaPoint], target: float, confidence: float) -> tuple[AlphaPoint | None, float]:
    """Return the smallest overhead that is shown to be good enough, and its bound; None and 1 for full prefill."""
    chosen: tuple[AlphaPoint | None, float] = (None, 1.0)
    for point in sorted(points, key=lambda one: (-one.mean_overhead, -one.alpha)):
        bound = lower_bound(point.agreements, confidence)
        if bound < target:
            break
        chosen = point, bound
    return chosen
