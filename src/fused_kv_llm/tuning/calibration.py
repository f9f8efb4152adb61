"""Calibration: how much has to be recomputed on this corpus so that answers stay those of full prefill.

The model answers questions greedily with full prefill; then, for every selector and ratio, its choices are compared
token by token along that same answer. The smallest ratio whose agreement reaches the target is kept for
``recompute_ratio="auto"``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch

from fused_kv_llm.config import DEFAULT_SELECTOR, check_ratio
from fused_kv_llm.engine import Calibration, FusedKVEngine, calibration_path
from fused_kv_llm.errors import ConfigError, CorpusError
from fused_kv_llm.offline import questions_from_chunks, retriever_of
from fused_kv_llm.paths import write_atomically
from fused_kv_llm.selectors import resolve_selector

__all__ = ["CalibrationPoint", "CalibrationResult", "calibrate", "check_calibration", "questions_from_chunks"]

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
FRAME = "Answer the question from the context.\n\nContext:\n{}\n\nQuestion: {}\nAnswer briefly."


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


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The curve, and what was chosen from it.

    Parameters
    ----------
    points : list of CalibrationPoint
    full_ttft_s : float
        Median seconds of full prefill.
    chosen : Calibration
    """

    points: list[CalibrationPoint]
    full_ttft_s: float
    chosen: Calibration


def check_calibration(
    questions: Sequence[str] | None,
    target_agreement: float,
    selectors: Sequence[str],
    ratios: Sequence[float] = RATIOS,
) -> None:
    """Refuse what :func:`calibrate` could not use, before a model is loaded or runs.

    Raises
    ------
    CorpusError
        If no questions are given, or one that is empty or no text.
    ConfigError
        If the target is outside (0, 1], a selector is unknown, a ratio is outside [0, 1], or there are none.
    """
    if not isinstance(target_agreement, (int, float)) or not 0.0 < target_agreement <= 1.0:
        raise ConfigError(f"target_agreement={target_agreement!r} is outside (0, 1]: 0.95 is a good start")
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
    target_agreement: float = 0.95,
    selectors: Sequence[str] = (DEFAULT_SELECTOR,),
    ratios: Sequence[float] = RATIOS,
    num_questions: int = 20,
    num_chunks: int = 5,
    answer_tokens: int = 16,
    track: Callable[[Sequence[tuple[str, str]]], Iterable[tuple[str, str]]] = iter,
) -> CalibrationResult:
    """Find the smallest ratio whose answers agree with full prefill's, and keep it beside the store.

    Parameters
    ----------
    engine : FusedKVEngine
        Its store holds the corpus.
    questions : sequence of str or None
        Asked of the corpus; None makes them from the chunks.
    target_agreement : float
        Share of full prefill's greedy tokens to be met, in (0, 1].
    selectors : sequence of str
    ratios : sequence of float
    num_questions : int
        Questions to make where none are given.
    num_chunks : int
        Chunks in a prompt.
    answer_tokens : int
        Tokens of an answer that are compared.
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
    check_calibration(questions, target_agreement, selectors, ratios)
    for name, count in (("num_questions", num_questions), ("num_chunks", num_chunks), ("answer_tokens", answer_tokens)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name}={count!r} is not a whole number of at least 1")
    chunks = engine.stored_texts()
    if not chunks:
        raise CorpusError("The store holds no chunk of this model: ingest the corpus before calibrating.")
    asked = questions_from_chunks(chunks, num_questions) if questions is None else [(q, "") for q in questions]
    if not asked:
        raise CorpusError("The chunks have no sentence long enough to make a question from: give questions.")
    for name in selectors:
        # Without them another rule would be measured than the one that is asked for.
        engine.build_anchors(chunks, selector=name, progress=False)
    retrieve = retriever_of(chunks, engine.store.kv_dir)
    points = [CalibrationPoint(name, ratio) for name in selectors for ratio in sorted(ratios)]
    full_s: list[float] = []
    for question, source in track(asked):
        context = list(dict.fromkeys([*([source] if source else []), *retrieve(question, num_chunks)]))[:num_chunks]
        random.Random(question).shuffle(context)
        prompt = FRAME.format("\n\n".join(context), question)
        answer = engine.generate(prompt, max_tokens=answer_tokens, recompute_ratio=1.0).token_ids
        full_s.append(_choices(engine, prompt, answer, 1.0, selectors[0])[1])
        for point in points:
            chosen, seconds = _choices(engine, prompt, answer, point.ratio, point.selector)
            point.agreements.append(fmean(float(a == b) for a, b in zip(chosen, answer, strict=True)))
            point.ttft_s.append(seconds)
    result = CalibrationResult(points, median(full_s), _choose(engine, points, target_agreement, len(asked)))
    write_atomically(calibration_path(engine.store.kv_dir, engine.fusion_identity), result.chosen.to_json().encode())
    return result


def _choices(
    engine: FusedKVEngine, prompt: str, answer: Sequence[int], ratio: float, selector: str
) -> tuple[list[int], float]:
    """Return what would be chosen at every token of the answer, and the seconds to the first."""
    started = time.perf_counter()
    fused, _ = engine.prefill(prompt, recompute_ratio=ratio, selector=selector, max_tokens=len(answer) + 1)
    seconds = time.perf_counter() - started
    logits = fused.logits[None]
    if len(answer) > 1:
        logits = torch.cat((logits, fused.append(engine.loaded, list(answer[:-1]))))
    fused.cache.release()
    return logits.argmax(dim=-1).tolist(), seconds


def _choose(
    engine: FusedKVEngine, points: Sequence[CalibrationPoint], target_agreement: float, questions: int
) -> Calibration:
    good = [point for point in points if point.agreement >= target_agreement]
    if not good:
        return Calibration(engine.fusion_identity, 1.0, points[0].selector, 1.0, target_agreement, questions)
    best = min(good, key=lambda point: (point.ratio, -point.agreement))
    return Calibration(engine.fusion_identity, best.ratio, best.selector, best.agreement, target_agreement, questions)
