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
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import Selector, resolve_selector

__all__ = [
    "CalibrationPoint",
    "CalibrationPrompts",
    "CalibrationResult",
    "agreement",
    "calibrate",
    "check_calibration",
    "questions_from_chunks",
]

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
    prompts = CalibrationPrompts(engine, questions, num_questions, num_chunks, answer_tokens)
    for name in selectors:
        # Without them another rule would be measured than the one that is asked for.
        engine.build_anchors(prompts.chunks, selector=name, progress=False)
    points = [CalibrationPoint(name, ratio) for name in selectors for ratio in sorted(ratios)]
    full_s: list[float] = []
    for question, source in track(prompts.asked):
        prompt, answer = prompts.answered(question, source)
        full_s.append(prompts.choices(prompt, answer, 1.0, selectors[0])[2])
        for point in points:
            chosen, _, seconds = prompts.choices(prompt, answer, point.ratio, point.selector)
            point.agreements.append(agreement(chosen, answer))
            point.ttft_s.append(seconds)
    result = CalibrationResult(points, median(full_s), _choose(engine, points, target_agreement, len(prompts.asked)))
    write_atomically(calibration_path(engine.store.kv_dir, engine.fusion_identity), result.chosen.to_json().encode())
    return result


class CalibrationPrompts:
    """Questions over a store's chunks, what full prefill answers, and what other ways would choose along that answer.

    Parameters
    ----------
    engine, questions, num_questions, num_chunks, answer_tokens
        As :func:`calibrate` takes them, which says what it raises.

    Attributes
    ----------
    chunks : list of str
        All that are stored.
    asked : list of (str, str)
        The questions, each with the chunk that it was made from, or an empty text.
    """

    def __init__(
        self,
        engine: FusedKVEngine,
        questions: Sequence[str] | None,
        num_questions: int,
        num_chunks: int,
        answer_tokens: int,
    ) -> None:
        counts = {"num_questions": num_questions, "num_chunks": num_chunks, "answer_tokens": answer_tokens}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{name}={count!r} is not a whole number of at least 1")
        self.chunks = engine.stored_texts()
        if not self.chunks:
            raise CorpusError("The store holds no chunk of this model: ingest the corpus before calibrating.")
        made = questions is None
        self.asked = questions_from_chunks(self.chunks, num_questions) if made else [(q, "") for q in questions or ()]
        if not self.asked:
            raise CorpusError("The chunks have no sentence long enough to make a question from: give questions.")
        self._engine, self._num_chunks, self._answer_tokens = engine, num_chunks, answer_tokens
        self._retrieve = retriever_of(self.chunks, engine.store.kv_dir)

    def answered(self, question: str, source: str) -> tuple[str, list[int]]:
        """Return the prompt of a question, and the tokens that full prefill answers greedily."""
        count = self._num_chunks
        context = list(dict.fromkeys([*([source] if source else []), *self._retrieve(question, count)]))[:count]
        random.Random(question).shuffle(context)
        prompt = FRAME.format("\n\n".join(context), question)
        full = self._engine.generate(prompt, max_tokens=self._answer_tokens, recompute_ratio=1.0)
        return prompt, list(full.token_ids)

    def choices(
        self, prompt: str, answer: Sequence[int], ratio: float, selector: str | Selector
    ) -> tuple[list[int], FusionReport, float]:
        """Return what would be chosen at every token of the answer, the report, and the seconds to the first."""
        engine, started = self._engine, time.perf_counter()
        fused, report = engine.prefill(prompt, recompute_ratio=ratio, selector=selector, max_tokens=len(answer) + 1)
        seconds = time.perf_counter() - started
        logits = fused.logits[None]
        if len(answer) > 1:
            logits = torch.cat((logits, fused.append(engine.loaded, list(answer[:-1]))))
        fused.cache.release()
        return logits.argmax(dim=-1).tolist(), report, seconds


def agreement(chosen: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share of an answer's tokens that were chosen too."""
    return fmean(float(a == b) for a, b in zip(chosen, answer, strict=True))


def _choose(
    engine: FusedKVEngine, points: Sequence[CalibrationPoint], target_agreement: float, questions: int
) -> Calibration:
    good = [point for point in points if point.agreement >= target_agreement]
    if not good:
        return Calibration(engine.fusion_identity, 1.0, points[0].selector, 1.0, target_agreement, questions)
    best = min(good, key=lambda point: (point.ratio, -point.agreement))
    return Calibration(engine.fusion_identity, best.ratio, best.selector, best.agreement, target_agreement, questions)
