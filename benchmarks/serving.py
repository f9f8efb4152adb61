"""Many users at once: throughput, time to first token and gaps between tokens, beside plain transformers.

    python benchmarks/serving.py --data ../shared/data/squad10.jsonl
    python benchmarks/serving.py --data ../shared/data/squad10.jsonl --at-once 8 --requests 16 --no-plain

A closed loop has so many users at once, each with the next question as soon as the last is answered. An open loop
(``--rate``, requests a second) lets them come as a Poisson process, whether or not the last ones are answered. Every
question has ten passages, about 1,650 tokens with the wording; every answer has 64 tokens. "Plain" is transformers'
``generate`` with SDPA, one request at a time. Systems are measured in one process, one after another, each after a
request that is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import matplotlib as mpl
import torch
from environment import environment, peak_rss_bytes, reset_peak_rss
from evaluation.questions import read_corpus, read_questions
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.decoding import end_token_ids
from fused_kv_llm.model.pretrained import locate

mpl.use("Agg")
import matplotlib.pyplot as plt

Answer = Callable[[str], Iterator[int]]


@dataclass
class Timings:
    """When the tokens of one answer came, in seconds since its request."""

    token_s: list[float]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from token to token."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


def timed(answer: Answer, prompt: str) -> Timings:
    """Answer a prompt and note when its tokens come."""
    started = time.perf_counter()
    return Timings([time.perf_counter() - started for _ in answer(prompt)])


def closed_loop(answer: Answer, prompts: list[str], at_once: int) -> dict[str, Any]:
    """Have so many users ask one prompt after another."""
    reset_peak_rss()
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as users:
        answers = list(users.map(lambda prompt: timed(answer, prompt), prompts))
    return summary(answers, time.perf_counter() - started)


def open_loop(answer: Answer, prompts: list[str], rate_per_s: float) -> dict[str, Any]:
    """Have requests come as a Poisson process; the same moments for every system."""
    drawn = random.Random(0)
    reset_peak_rss()
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
    return summary(answers, time.perf_counter() - started)


def summary(answers: list[Timings], wall_s: float) -> dict[str, Any]:
    """Return throughput and percentiles."""
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
        "peak_rss_bytes": peak_rss_bytes(),
    }


def percentile(values: list[float], share: int) -> float:
    """Return the value that `share` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


def of_engine(engine: FusedKVEngine, max_tokens: int) -> Answer:
    """Return how the engine answers, without ending by itself."""
    ends = torch.tensor(sorted(end_token_ids(engine.loaded)))

    def go_on(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(0, ends, -torch.inf)

    def answer(prompt: str) -> Iterator[int]:
        for piece in engine.submit(prompt, max_tokens=max_tokens, constraint=go_on).pieces():
            if piece.token_id is not None:
                yield piece.token_id

    return answer


def of_plain(engine: FusedKVEngine, plain: Any, max_tokens: int) -> Answer:
    """Return how plain transformers answers, one prompt at a time."""
    turn = threading.Lock()

    def answer(prompt: str) -> Iterator[int]:
        with turn:
            yield from _Streamed(engine, plain, prompt, max_tokens)

    return answer


class _Streamed:
    """The tokens of transformers' ``generate``, as they come."""

    def __init__(self, engine: FusedKVEngine, plain: Any, prompt: str, max_tokens: int) -> None:
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._is_prompt = True
        ids = torch.tensor([engine.encode(prompt)])
        options = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": False, "streamer": self}
        self._thread = threading.Thread(target=plain.generate, args=(ids,), kwargs=options)
        self._thread.start()

    def put(self, ids: torch.Tensor) -> None:
        """Take the prompt, then one token at a time."""
        if not self._is_prompt:
            self._queue.put(int(ids.flatten()[-1]))
        self._is_prompt = False

    def end(self) -> None:
        """Take the end of the answer."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[int]:
        while (token := self._queue.get()) is not None:
            yield token
        self._thread.join()


def measure(args: argparse.Namespace, engine: FusedKVEngine, prompts: list[str]) -> list[dict[str, Any]]:
    """Measure every system and load."""
    systems: dict[str, tuple[Answer, list[int]]] = {"fused": (of_engine(engine, args.max_tokens), args.at_once)}
    if not args.no_plain:
        plain = AutoModelForCausalLM.from_pretrained(
            locate(args.model)[1], dtype=engine.loaded.dtype, attn_implementation="sdpa"
        ).eval()
        systems["plain"] = (of_plain(engine, plain, args.max_tokens), [1])
    rows = []
    for name, (answer, at_once) in systems.items():
        timed(answer, prompts[0])
        loads = [("closed", "at_once", users, closed_loop) for users in at_once]
        loads += [("open", "rate_per_s", rate, open_loop) for rate in (args.rate if name == "fused" else [])]
        rows += [{"system": name, "load": load, key: value, **run(answer, prompts, value)}
                 for load, key, value, run in loads]  # fmt: skip
    return rows


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Print one line a load."""
    table = Table(title=title)
    for column in ("system", "load", "tokens/s", "requests/s", "TTFT p50", "p95", "p99", "gap p50", "p99"):
        table.add_column(column, justify="left" if column in ("system", "load") else "right")
    for row in rows:
        load = f"{row['at_once']} at once" if row["load"] == "closed" else f"{row['rate_per_s']:g} a second"
        times = [f"{row[name]:.3f}" for name in ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "gap_p50_s", "gap_p99_s")]
        table.add_row(row["system"], load, f"{row['tokens_per_s']:.1f}", f"{row['requests_per_s']:.2f}", *times)
    Console(width=110).print(table)


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw throughput and time to first token over the number of users."""
    closed = [row for row in rows if row["load"] == "closed"]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, name, label in (
        (panels[0], "tokens_per_s", "answer tokens a second"),
        (panels[1], "ttft_p95_s", "time to first token, 95th percentile (s)"),
    ):
        for system, colour in (("fused", "#1b9e77"), ("plain", "black")):
            points = [(row["at_once"], row[name]) for row in closed if row["system"] == system]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=system)
        axes.set_xlabel("users at once")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a question file")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="requests a second, open loop")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--max-batched-rows", type=int, default=None, help="the engine's; by default after the machine")
    parser.add_argument("--no-plain", action="store_true", help="leave plain transformers out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "serving_cpu")
    args = parser.parse_args()
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-bench-"))
    options = {"kv_dir": kv_dir, "dtype": args.dtype, "memory_bytes": 4 * 2**30}
    with FusedKVEngine(args.model, max_batched_rows=args.max_batched_rows, **options) as engine:
        prompts = [question.prompt("instruct") for question in read_questions(args.data, args.requests, 10)]
        used = [text for text in read_corpus(args.data) if any(text in prompt for prompt in prompts)]
        print(engine.build_kv_cache(used, preprocess="wait").summary())
        rows = measure(args, engine, prompts)
        stamp = environment()
        title = f"{args.model}, {engine.dtype}, {stamp['cores']} cores of {stamp['cpu']}"
        tokens = [len(engine.encode(prompt)) for prompt in prompts]
    print_table(rows, title)
    result = {"environment": stamp, "model": args.model, "prompt_tokens": tokens, "rows": rows}
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
    draw(rows, args.out.with_suffix(".png"), title)


if __name__ == "__main__":
    main()
