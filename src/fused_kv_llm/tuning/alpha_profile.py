"""The scale of Cache-Craft's overhead: alpha* = argmin E[CFO_alpha], subject to a quality that is asked for (eq. 13).

``CFO_alpha`` grows with alpha, so alpha* is the smallest one that is good enough on questions of the corpus. Quality is
measured as :mod:`.calibration` does, by agreement with full prefill's greedy tokens; the paper takes the F1 of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from fused_kv_llm.engine import Calibration, FusedKVEngine, calibration_path
from fused_kv_llm.errors import ConfigError, CorpusError
from fused_kv_llm.paths import write_atomically
from fused_kv_llm.selectors import CacheCraft

from .calibration import CalibrationPrompts, agreement, check_calibration

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
        Kept for ``recompute_ratio="auto"``: full prefill if no alpha is good enough.
    """

    points: list[AlphaPoint]
    chosen: Calibration


def profile_alpha(
    engine: FusedKVEngine,
    questions: Sequence[str] | None = None,
    *,
    target_agreement: float = 0.95,
    alphas: Sequence[float] = ALPHAS,
    num_questions: int = 20,
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
    questions, target_agreement, num_questions, num_chunks, answer_tokens, track
        As :func:`.calibrate` takes them.

    Raises
    ------
    CorpusError
        If the store holds nothing to ask about, or no variants; or a question is empty.
    ConfigError
        If the engine uses no variants, or another option cannot work.
    """
    check_calibration(questions, target_agreement, (CacheCraft.name,))
    if not alphas or any(isinstance(a, bool) or not isinstance(a, (int, float)) or not a > 0 for a in alphas):
        raise ConfigError(f"alphas={alphas!r} is not a list of positive numbers: leave it out to try {ALPHAS}")
    if engine.corpus.variants is None:
        raise ConfigError("variants=0 has no records for cache_craft to go by: open the engine with variants=3")
    if engine.corpus.variants.usage()[0] == 0:
        raise CorpusError("The store holds no variant of a chunk yet: answer questions with variants=3 first.")
    prompts = CalibrationPrompts(engine, questions, num_questions, num_chunks, answer_tokens)
    points = [AlphaPoint(float(alpha)) for alpha in sorted(set(alphas))]
    engine.corpus.keeps_prompts = False
    try:
        for question, source in track(prompts.asked):
            prompt, answer = prompts.answered(question, source)
            for point in points:
                chosen, report, _ = prompts.choices(prompt, answer, _MOST, CacheCraft(point.alpha))
                point.agreements.append(agreement(chosen, answer))
                point.overheads += [one["overhead"] for one in report.variants]
    finally:
        engine.corpus.keeps_prompts = True
    chosen_one = _choose(engine, points, target_agreement, len(prompts.asked))
    write_atomically(calibration_path(engine.store.kv_dir, engine.fusion_identity), chosen_one.to_json().encode())
    return AlphaProfile(points, chosen_one)


def _choose(engine: FusedKVEngine, points: Sequence[AlphaPoint], target: float, questions: int) -> Calibration:
    good = [point for point in points if point.agreement >= target]
    if not good:
        return Calibration(engine.fusion_identity, 1.0, CacheCraft.name, 1.0, target, questions)
    best = min(good, key=lambda point: (point.mean_overhead, point.alpha))
    return Calibration(
        engine.fusion_identity, _MOST, CacheCraft.name, best.agreement, target, questions, alpha=best.alpha
    )
