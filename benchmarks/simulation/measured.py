"""The real engine: what its passes and steps take, and what requests of a load wait.

Both are of one run, in turns: the speed of a machine that is shared differs by a quarter from minute to minute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from evaluation.questions import Question, read_questions

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.decoding import end_token_ids
from fused_kv_llm.report import FusionReport

from .reuse import work_of
from .trace import poisson

__all__ = ["LOADS", "Load", "Prompts", "calibration", "measured_run", "served"]

PASSAGES = (2, 5, 10, 20)
RATIOS = (0.0, 0.15, 0.3, 1.0)
# Answers at once, and passages of their prompts.
STEPS = ((1, 10), (4, 10), (8, 3))
STEP_TOKENS = 32
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that the real engine and the simulated one both get.

    Parameters
    ----------
    name : str
    requests, answer_tokens : int
    passages : tuple of int
        Numbers of passages, in turn.
    ratio : float
    rate_per_s : float or None
        Of a Poisson process; None for a closed loop.
    users : int
        Of a closed loop.
    """

    name: str
    requests: int
    answer_tokens: int
    passages: tuple[int, ...]
    ratio: float
    rate_per_s: float | None = None
    users: int = 0


LOADS = {
    "open": Load("open", 18, 32, (10,), 0.15, rate_per_s=0.8),
    "closed": Load("closed", 16, 48, (3, 10, 6), 0.3, users=6),
}


class Prompts:
    """Prompts of a question file whose passages are stored.

    Parameters
    ----------
    data : Path
    engine : FusedKVEngine
    questions : int
    """

    def __init__(self, data: Path, engine: FusedKVEngine, questions: int) -> None:
        self._questions = read_questions(data, questions, 10)
        self.passages = list(dict.fromkeys(text for one in self._questions for text in one.passages))
        self._places = {text: place for place, text in enumerate(self.passages)}
        # What stands around a prompt in the chat template is no passage.
        around = len(engine.encode(".")) - 1
        self.passage_tokens = [len(engine.encode(text)) - around for text in self.passages]

    def prompt(self, number: int, passages: int) -> tuple[str, list[int]]:
        """Return a prompt that was not asked before, and its passages by number."""
        one, other = (self._questions[(number + step) % len(self._questions)] for step in (0, 7))
        texts = list(dict.fromkeys([*one.passages, *other.passages]))[:passages]
        asked = Question(one.id, f"{next(_numbers)}. {one.question}", one.answers, tuple(texts))
        return asked.prompt("instruct"), [self._places[text] for text in texts]


class _Timed:
    """An answer, and when its tokens came."""

    def __init__(self, engine: FusedKVEngine, prompt: str, max_tokens: int, ratio: float) -> None:
        ends = torch.tensor(sorted(end_token_ids(engine.loaded)))

        def go_on(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill_(0, ends, -torch.inf)

        self.asked_s, self.token_s = time.perf_counter(), list[float]()
        self._report: FusionReport | None = None
        self._handle = engine.submit(prompt, max_tokens=max_tokens, recompute_ratio=ratio, constraint=go_on)
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        for piece in self._handle.pieces():
            if piece.token_id is not None:
                self.token_s.append(time.perf_counter())
            self._report = piece.report

    def wait(self) -> FusionReport:
        """Return its report when it is complete."""
        self._thread.join()
        if self._report is None:
            raise RuntimeError("a request of the benchmark has failed")
        return self._report


def measured_run(engine: FusedKVEngine, prompts: Prompts) -> dict[str, Any]:
    """Measure passes and steps before, between and after the loads."""
    for number in range(0, 40, 2):
        # Chunks and what stands beside them come into memory.
        _Timed(engine, prompts.prompt(number, 20)[0], 1, 0.0).wait()
    found: dict[str, Any] = {"calibration": calibration(engine, prompts, 0), "measured": {}}
    for turn, load in enumerate(LOADS.values()):
        found["measured"][load.name] = served(engine, prompts, load)
        for name, more in calibration(engine, prompts, turn + 1).items():
            found["calibration"][name] += more
    return found


def calibration(engine: FusedKVEngine, prompts: Prompts, turn: int) -> dict[str, list[dict[str, float]]]:
    """Measure passes of prompts alone, and steps of answers at once."""
    passes = []
    for passages in PASSAGES:
        for ratio in RATIOS:
            if passages * ratio <= 10:
                text, _ = prompts.prompt(3 * passages + turn, passages)
                passes.append({"turn": turn, **_pass(_Timed(engine, text, 1, ratio).wait(), ratio)})
    return {"prompts": passes, "steps": [{"turn": turn, **_step(engine, prompts, *one)} for one in STEPS]}


def _pass(report: FusionReport, ratio: float) -> dict[str, float]:
    seconds = report.seconds
    known_s = sum(seconds.get(stage, 0.0) for stage in ("align", "probe", "fuse"))
    # At ratio 1 nothing stored is placed.
    placed = report.reused_tokens + report.recomputed_tokens if ratio < 1 else 0
    work = work_of(report.recomputed_tokens, report.fresh_tokens, report.prompt_tokens, placed)
    return {
        "ratio": ratio,
        "prompt_tokens": report.prompt_tokens,
        "rows": work.rows,
        "pairs": work.pairs,
        "placed": work.placed,
        "align_s": seconds["align"],
        "probe_s": seconds.get("probe", 0.0),
        "fuse_s": seconds["fuse"],
        "known_s": known_s,
        "ttft_s": report.ttft_s,
    }


def _step(engine: FusedKVEngine, prompts: Prompts, answers: int, passages: int) -> dict[str, float]:
    """Measure steps in which so many answers are written, between the last one's beginning and the first one's end."""
    asked = [_Timed(engine, prompts.prompt(number, passages)[0], STEP_TOKENS, 0.0) for number in range(answers)]
    reports = [one.wait() for one in asked]
    first_s, last_s = max(one.token_s[0] for one in asked), min(one.token_s[-1] for one in asked)
    inside = [[moment for moment in one.token_s if first_s <= moment <= last_s] for one in asked]
    step_s = mean((one[-1] - one[0]) / (len(one) - 1) for one in inside if len(one) > 2)
    keys = sum(report.prompt_tokens + STEP_TOKENS / 2 for report in reports)
    return {"answers": answers, "keys": keys, "step_s": step_s}


def served(engine: FusedKVEngine, prompts: Prompts, load: Load) -> dict[str, Any]:
    """Answer a load, and return what was asked and what each request waited."""
    texts, chunks = zip(
        *(prompts.prompt(number, load.passages[number % len(load.passages)]) for number in range(load.requests)),
        strict=True,
    )
    answers: list[_Timed] = []
    if load.rate_per_s is not None:
        began_s = time.perf_counter()
        for text, at_s in zip(texts, poisson(load.requests, load.rate_per_s), strict=True):
            time.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            answers.append(_Timed(engine, text, load.answer_tokens, load.ratio))
        reports = [one.wait() for one in answers]
    else:
        reports = _closed(engine, texts, load, answers)
    rows = [
        {
            "chunks": list(places),
            "question_tokens": report.prompt_tokens - report.prefix_tokens - sum(_tokens(prompts, places)),
            "prompt_tokens": report.prompt_tokens,
            "ttft_s": one.token_s[0] - one.asked_s,
            "latency_s": one.token_s[-1] - one.asked_s,
            "asked_s": one.asked_s - answers[0].asked_s,
            "seconds": report.seconds,
        }
        for one, report, places in zip(answers, reports, chunks, strict=True)
    ]
    return {"rows": rows, "chunk_tokens": prompts.passage_tokens}


def _tokens(prompts: Prompts, places: Sequence[int]) -> list[int]:
    return [prompts.passage_tokens[place] for place in places]


def _closed(engine: FusedKVEngine, texts: Sequence[str], load: Load, answers: list[_Timed]) -> list[FusionReport]:
    """Have users take the next text when their last one is answered; `answers` are in the texts' order."""
    left, lock, found = iter(range(load.requests)), threading.Lock(), dict[int, tuple[_Timed, FusionReport]]()

    def user() -> None:
        while True:
            with lock:
                number = next(left, None)
                if number is None:
                    return
                one = _Timed(engine, texts[number], load.answer_tokens, load.ratio)
            found[number] = one, one.wait()

    users = [threading.Thread(target=user) for _ in range(load.users)]
    for each in users:
        each.start()
    for each in users:
        each.join()
    answers.extend(found[number][0] for number in range(load.requests))
    return [found[number][1] for number in range(load.requests)]
