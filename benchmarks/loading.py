"""Loading ahead: a slow disk beside one request, layer by layer, and beside a queue of them.

    python benchmarks/loading.py --data ../shared/data/squad10.jsonl --kv-dir kv

The disk is slowed down by sleeping (``ThrottledReader``) until loading takes as long as computing, with the first of
the selectors. Alone: seconds to the first token for several depths, the numbers of layers that must be there before a
request begins; the last one is to load all first; "equation 16" is what the engine chooses. Queue: so many requests at
once, loaded ahead or when due. Every measurement begins with an empty memory tier; the queue has none. Times are the
least of several runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from environment import environment
from evaluation.questions import Question, read_corpus, read_questions
from rich.console import Console
from rich.table import Table

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.online import RequestLoading
from fused_kv_llm.report import FusionReport
from fused_kv_llm.serving import loop_of
from fused_kv_llm.store import ThrottledReader
from fused_kv_llm.store.read.blocks import read_block


class CountingReader:
    """Reads as the engine does, and counts."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, fd: int, target: memoryview, offset: int) -> None:
        """Fill `target` with the file's bytes from `offset`."""
        self.nbytes += len(target)
        read_block(fd, target, offset)


def first_token(engine: FusedKVEngine, prompt: str, selector: str | None) -> FusionReport:
    """Answer with one token and return the report."""
    report: FusionReport = engine.generate(prompt, max_tokens=1, selector=selector).report
    return report


def alone(engine: FusedKVEngine, prompt: str, selector: str | None, repeats: int, rate: float | None) -> dict[str, Any]:
    """Sweep the depth for one request; without a rate in bytes/s, its loading takes as long as its computing."""
    num_layers = engine.loaded.geometry.num_layers
    reader = CountingReader()
    engine.store.read_with(reader)
    engine.store.drop_memory()
    first_token(engine, prompt, selector)
    # From here on it is in memory.
    compute_s = min(first_token(engine, prompt, selector).ttft_s or 0.0 for _ in range(repeats + 2))
    rate = rate or reader.nbytes / compute_s
    engine.store.read_with(ThrottledReader(rate))
    depths: list[int | None] = [None, 1, num_layers // 4, num_layers // 2, 3 * num_layers // 4, num_layers]
    found: dict[int | None, list[float]] = {depth: [] for depth in depths}
    chosen: list[int] = []
    for _ in range(repeats):
        for depth in depths:
            engine.store.drop_memory()
            with noting_depth(chosen) if depth is None else patch.object(RequestLoading, "depth", depth):
                report = first_token(engine, prompt, selector)
            if set(report.bytes_loaded) != {"disk"}:
                raise RuntimeError(f"loaded from {sorted(report.bytes_loaded)}, not from the disk")
            found[depth].append(report.ttft_s or 0.0)
    ttft_s = {depth: min(values) for depth, values in found.items()}
    chosen_s, all_s = ttft_s.pop(None), ttft_s[num_layers]
    return {
        "selector": selector or engine.selector,
        "in_memory_s": compute_s,
        "nbytes": reader.nbytes,
        "bytes_per_s": rate,
        "equation_16_s": chosen_s,
        "equation_16_depths": chosen,
        "ttft_s_by_depth": ttft_s,
        "times_sooner_than_loading_first": all_s / chosen_s,
        "over_best": chosen_s / min(*ttft_s.values(), chosen_s),
    }


@contextmanager
def noting_depth(depths: list[int]) -> Iterator[None]:
    """Note how many layers were there when requests began."""
    check = RequestLoading.check

    def noting(self: RequestLoading) -> float:
        depths.append(self.depth)
        return check(self)

    with patch.object(RequestLoading, "check", noting):
        yield


def disjoint(questions: Sequence[Question], count: int) -> list[Question]:
    """Return questions of which no two have a passage in common, as far as there are any."""
    found: list[Question] = []
    used: set[str] = set()
    for question in questions:
        texts = set(question.passages)
        if len(found) < count and not texts & used:
            found.append(question)
            used |= texts
    return found


def queue(engine: FusedKVEngine, prompts: list[str], max_tokens: int, repeats: int) -> dict[str, Any]:
    """Have a queue of requests answered with and without loading ahead."""

    def run() -> float:
        started = time.perf_counter()
        handles = [engine.submit(prompt, max_tokens=max_tokens) for prompt in prompts]
        for handle in handles:
            handle.result()
        return time.perf_counter() - started

    loop, reader = loop_of(engine.model), CountingReader()
    engine.store.read_with(reader)
    loop.scheduler.loading.loads_ahead = False
    run()
    nbytes = reader.nbytes
    fast_s = min(run() for _ in range(repeats))
    engine.store.read_with(ThrottledReader(nbytes / fast_s))
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        for ahead, seconds in found.items():
            loop.scheduler.loading.loads_ahead = ahead
            seconds.append(run())
    loop.scheduler.loading.loads_ahead = True
    ahead_s, due_s = min(found[True]), min(found[False])
    return {
        "requests": len(prompts),
        "max_tokens": max_tokens,
        "nbytes": nbytes,
        "fast_disk_s": fast_s,
        "loaded_ahead_s": ahead_s,
        "loaded_when_due_s": due_s,
        "times_the_throughput": due_s / ahead_s,
    }


def print_tables(rows: list[dict[str, Any]], queued: dict[str, Any]) -> None:
    """Print one line a selector, and one for the queue."""
    table = Table(title="alone: seconds to the first token by depth")
    depths = list(rows[0]["ttft_s_by_depth"])
    for column in ("selector", "in memory", *map(str, depths), "equation 16", "x sooner", "over best"):
        table.add_column(column)
    for row in rows:
        times = [row["in_memory_s"], *row["ttft_s_by_depth"].values(), row["equation_16_s"],
                 row["times_sooner_than_loading_first"], row["over_best"]]  # fmt: skip
        table.add_row(row["selector"], *(f"{value:.2f}" for value in times))
    Console(width=120).print(table)
    Console(width=120).print(queued)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a question file")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--selectors", nargs="+", default=["default", "sink_attention_anchors", "boundary"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--preprocess", choices=["wait", "later"], default="wait", help="later: without context shifts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "loading_cpu.json")
    args = parser.parse_args()
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-bench-"))
    with FusedKVEngine(args.model, kv_dir=kv_dir, prefix_cache_bytes=0) as engine:
        questions = disjoint(read_questions(args.data, 100, 10), args.requests)
        prompts = [question.prompt("instruct") for question in questions]
        used = [text for text in read_corpus(args.data) if any(text in prompt for prompt in prompts)]
        print(engine.build_kv_cache(used, preprocess=args.preprocess).summary())
        names = [None if name == "default" else name for name in args.selectors]
        rows = list[dict[str, Any]]()
        for name in names:
            engine.build_anchors(used, selector=name)
            rows.append(alone(engine, prompts[0], name, args.repeats, rows[0]["bytes_per_s"] if rows else None))
        tokens = [len(engine.encode(prompt)) for prompt in prompts]
        model = engine.loaded
    print(json.dumps(rows), flush=True)
    with FusedKVEngine(model, kv_dir=kv_dir, memory_bytes=0, prefix_cache_bytes=0) as engine:
        queued = queue(engine, prompts, args.max_tokens, args.repeats)
    print_tables(rows, queued)
    result = {
        "environment": environment(),
        "model": args.model,
        "prompt_tokens": tokens,
        "alone": rows,
        "queue": queued,
    }
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
