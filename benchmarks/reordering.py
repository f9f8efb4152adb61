"""A saturated queue, in the order of arrival and with what is cached first (RAGCache section 5.2).

    python benchmarks/reordering.py --data ../shared/data/squad10.jsonl

All requests arrive at once, in a random order. Every question has ten passages; of one half of the questions they are
stored, of the other half they are not. Both queues get the same prompts in the same order, in turns, and every round
has questions of its own. Nothing is stored meanwhile. Overtaken says how often the request that waited longest in the
queue let a later one go first.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from environment import environment
from evaluation.questions import Question, read_questions

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.serving.waiting import WaitingRequests


def answer_all(engine: FusedKVEngine, prompts: list[str], max_tokens: int) -> list[float]:
    """Ask everything at once; return the seconds to the first tokens, sorted."""
    handles = [engine.submit(prompt, max_tokens=max_tokens) for prompt in prompts]
    return sorted(handle.result().report.ttft_s or 0.0 for handle in handles)


def halves(questions: list[Question], count: int) -> tuple[list[str], list[str]]:
    """Return the passages to be stored, and as many prompts with these passages as with none of them, in turns."""
    known, unknown = questions[: count // 2], list[Question]()
    stored = list(dict.fromkeys(text for question in known for text in question.passages))
    for question in questions[count // 2 :]:
        if not set(question.passages) & set(stored):
            unknown.append(question)
    pairs = zip(known, unknown, strict=False)
    return stored, [question.prompt("instruct") for pair in pairs for question in pair]


def most_overtaken() -> list[int]:
    """Have it noted how often a request had been overtaken when it was taken from the queue."""
    seen, take = list[int](), WaitingRequests.take

    def noting(self: WaitingRequests) -> Any:
        request = take(self)
        if request is not None:
            seen.append(request.overtaken)
        return request

    WaitingRequests.take = noting  # type: ignore[method-assign]
    return seen


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--passages", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 8, 32])
    parser.add_argument("--out", type=Path, default=None, help="where the record is written; none by default")
    args = parser.parse_args()
    stored, prompts = halves(read_questions(args.data, 400, args.passages), args.requests * args.rounds)
    options: dict[str, Any] = {"preprocessing": "none", "store_misses": False, "prefix_cache_bytes": 0}
    overtaken, ttft_s = most_overtaken(), {window: list[float]() for window in args.windows}
    most = dict.fromkeys(args.windows, 0)
    with tempfile.TemporaryDirectory() as folder:
        engines = {}
        for window in args.windows:
            source = next(iter(engines.values())).loaded if engines else "smollm2-135m"
            engines[window] = FusedKVEngine(source, kv_dir=folder, reorder_window=window, **options)
        first = next(iter(engines.values()))
        print(first.build_kv_cache(stored).summary())
        answer_all(first, prompts[:2], args.max_tokens)
        for number in range(args.rounds):
            asked = prompts[number * args.requests : (number + 1) * args.requests]
            random.Random(number).shuffle(asked)
            for window, engine in engines.items():
                overtaken.clear()
                ttft_s[window] += answer_all(engine, asked, args.max_tokens)
                most[window] = max(most[window], *overtaken)
        for engine in engines.values():
            engine.close()
    rows = [
        {
            "reorder_window": window,
            "ttft_mean_s": round(statistics.mean(found), 3),
            "ttft_p50_s": round(statistics.median(found), 3),
            "ttft_longest_s": round(max(found), 3),
            "most_overtaken": most[window],
            "times_sooner": round(statistics.mean(ttft_s[args.windows[0]]) / statistics.mean(found), 3),
        }
        for window, found in ttft_s.items()
    ]
    for row in rows:
        print(json.dumps(row))
    if args.out:
        args.out.write_text(
            json.dumps({"environment": environment(), "requests": args.requests, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
