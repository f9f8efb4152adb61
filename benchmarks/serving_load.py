"""Loads for a server of answers, and what is measured: throughput, times to first token, gaps between tokens.

A system under test is a callable that takes a prompt (a text, or token ids) and yields the answer's tokens as they
come. Nothing here needs more than Python, so that systems in other environments are measured by the same code.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["Answer", "Timings", "closed_loop", "gap_beside_a_long_prompt", "open_loop", "percentile", "timed"]

Answer = Callable[[Any], Iterator[Any]]
# Tokens that every running answer is watched for, without the long prompt.
_WATCHED_TOKENS = 40


@dataclass
class Timings:
    """When an answer was asked for, and when its tokens came, in seconds since then.

    Parameters
    ----------
    started_s : float
        ``time.perf_counter()``.
    token_s : list of float
    """

    started_s: float
    token_s: list[float]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from token to token."""
        return [b - a for a, b in pairwise(self.token_s)]


def timed(answer: Answer, prompt: Any) -> Timings:
    """Answer a prompt and note when its tokens come."""
    timings = Timings(time.perf_counter(), [])
    timings.token_s.extend(time.perf_counter() - timings.started_s for _ in answer(prompt))
    return timings


def closed_loop(answer: Answer, prompts: Sequence[Any], at_once: int) -> dict[str, Any]:
    """Have so many users ask one prompt after another."""
    _reset_peak_rss()
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as users:
        answers = list(users.map(lambda prompt: timed(answer, prompt), prompts))
    return _summary(answers, time.perf_counter() - started)


def open_loop(answer: Answer, prompts: Sequence[Any], rate_per_s: float) -> dict[str, Any]:
    """Have requests come as a Poisson process; the same moments for every system."""
    drawn = random.Random(0)
    _reset_peak_rss()
    answers: list[Timings] = []
    started = time.perf_counter()
    threads = []
    for prompt in prompts:
        thread = threading.Thread(target=lambda prompt=prompt: answers.append(timed(answer, prompt)))
        thread.start()
        threads.append(thread)
        time.sleep(drawn.expovariate(rate_per_s))
    for thread in threads:
        thread.join()
    return _summary(answers, time.perf_counter() - started)


def gap_beside_a_long_prompt(answer: Answer, prompts: Sequence[Any], long_prompt: Any) -> dict[str, Any]:
    """Measure the gaps of answers that are being written, without and with a long prompt that begins beside them.

    Parameters
    ----------
    answer : Answer
        Whose answers are long enough to go on while the long prompt is computed.
    prompts : sequence
        Of the running answers, one each.
    long_prompt : object

    Returns
    -------
    dict
        Percentiles of the running answers' gaps and the peak of resident memory, ``alone`` and ``beside`` the long
        prompt, from its request to its first token; and the long prompt's time to its first token.
    """
    moments: list[list[float]] = [[] for _ in prompts]
    enough = threading.Event()

    def run(number: int) -> None:
        for _ in answer(prompts[number]):
            moments[number].append(time.perf_counter())
            if enough.is_set():
                return

    users = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for user in users:
        user.start()
    _wait_for_tokens(users, moments, [1] * len(moments))
    _reset_peak_rss()
    began = time.perf_counter()
    _wait_for_tokens(users, moments, [len(one) + _WATCHED_TOKENS for one in moments])
    alone_rss = _peak_rss_bytes()
    _reset_peak_rss()
    asked = time.perf_counter()
    stream = answer(long_prompt)
    next(stream)
    first = time.perf_counter()
    beside_rss = _peak_rss_bytes()
    running = [one[-1] >= first or user.is_alive() for one, user in zip(moments, users, strict=True)]
    enough.set()
    for _ in stream:
        pass
    for user in users:
        user.join()
    return {
        "running": len(prompts),
        "ran_throughout": sum(running),
        "alone": {**_gaps(moments, began, asked), "peak_rss_bytes": alone_rss},
        "beside": {**_gaps(moments, asked, first), "peak_rss_bytes": beside_rss},
        "long_prompt_ttft_s": first - asked,
    }


def percentile(values: Sequence[float], share: int) -> float:
    """Return the value that `share` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


def _wait_for_tokens(users: list[threading.Thread], moments: list[list[float]], counts: list[int]) -> None:
    while any(user.is_alive() and len(one) < count for user, one, count in zip(users, moments, counts, strict=True)):
        time.sleep(0.002)


def _gaps(moments: list[list[float]], from_s: float, to_s: float) -> dict[str, float]:
    """Summarise the gaps that end within a span, or last from within it to the next token."""
    gaps = [b - a for one in moments for a, b in pairwise(one) if b > from_s and a < to_s]
    return {"gap_p50_s": percentile(gaps, 50), "gap_p99_s": percentile(gaps, 99), "gap_max_s": max(gaps)}


def _summary(answers: list[Timings], wall_s: float) -> dict[str, Any]:
    firsts = [one.token_s[0] for one in answers]
    gaps = [gap for one in answers for gap in one.gaps_s] or [0.0]
    tokens = sum(len(one.token_s) for one in answers)
    return {
        "wall_s": wall_s,
        "requests": len(answers),
        "tokens": tokens,
        "tokens_per_s": tokens / wall_s,
        "requests_per_s": len(answers) / wall_s,
        "ttft_mean_s": statistics.mean(firsts),
        **{f"ttft_p{share}_s": percentile(firsts, share) for share in (50, 95, 99)},
        **{f"gap_p{share}_s": percentile(gaps, share) for share in (50, 99)},
        "peak_rss_bytes": _peak_rss_bytes(),
    }


def _reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_rss_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
