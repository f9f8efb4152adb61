"""Decoding and who else computes: other threads of the process, other processes.

    python benchmarks/threads.py --data ../shared/data/squad10.jsonl

33 tokens after a prompt of about 1,600: alone; after another thread of the process has computed with torch, whose
OpenMP workers are kept or released; beside a process with two busy threads, where this process's workers may sleep
early ("crowded") or not. Seconds are those after the first token, so that the prompt does not count.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import torch
from busy import busy_process
from copied_store import copied_store
from environment import environment
from evaluation.questions import read_corpus, read_questions
from serving_systems import of_engine

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.thread_pool import release_openmp_workers

_TOKENS = 33


def decode_s(engine: FusedKVEngine, prompt: str) -> float:
    """Return the seconds from the first token of an answer to the last of 33."""
    pieces = of_engine(engine, _TOKENS)(prompt)
    next(pieces)
    started_s = time.perf_counter()
    for _ in pieces:
        pass
    return time.perf_counter() - started_s


class Computed:
    """A thread that computes with torch and then stays, with or without its OpenMP workers."""

    def __init__(self, *, releases: bool) -> None:
        self._over, ready = threading.Event(), threading.Event()

        def run() -> None:
            torch.randn(1500, 1500) @ torch.randn(1500, 1500)
            if releases:
                release_openmp_workers()
            ready.set()
            self._over.wait()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        ready.wait()

    def end(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()


def measure(engine: FusedKVEngine, prompt: str, repeats: int) -> dict[str, list[float]]:
    """Measure every case as often, in turns."""
    cores = engine.requests._loop.scheduler.means.cores
    look = cores.look
    seconds: dict[str, list[float]] = {}
    decode_s(engine, prompt)
    for _ in range(repeats):
        seconds.setdefault("alone", []).append(decode_s(engine, prompt))
        for name, releases in (("after_a_thread_kept", False), ("after_a_thread_released", True)):
            thread = Computed(releases=releases)
            seconds.setdefault(name, []).append(decode_s(engine, prompt))
            thread.end()
        for name, crowded in (("beside_a_process_crowded", True), ("beside_a_process_not_crowded", False)):
            cores.look = look if crowded else lambda: None  # type: ignore[method-assign]
            with busy_process(2):
                time.sleep(0.5)
                seconds.setdefault(name, []).append(decode_s(engine, prompt))
            cores.end()
        cores.look = look  # type: ignore[method-assign]
        time.sleep(0.5)
        print({name: round(values[-1], 2) for name, values in seconds.items()}, flush=True)
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a question file")
    parser.add_argument("--kv-dir", type=Path, default=None, help="a store with the question's chunks; it is copied")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "threads_cpu.json")
    args = parser.parse_args()
    with FusedKVEngine(
        "smollm2-135m",
        kv_dir=copied_store(args.kv_dir),
        memory_bytes=2 * 2**30,
        store_misses=False,
        prefix_cache_bytes=0,
    ) as engine:
        prompt = read_questions(args.data, 1, 10)[0].prompt("instruct")
        engine.build_kv_cache([text for text in read_corpus(args.data) if text in prompt], preprocess="wait")
        seconds = measure(engine, prompt, args.repeats)
        tokens = len(engine.encode(prompt))
    median: dict[str, Any] = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    result = {
        "environment": environment(),
        "model": "smollm2-135m",
        "prompt_tokens": tokens,
        "seconds": seconds,
        "median_s": median,
        "factor": {name: value / median["alone"] for name, value in median.items()},
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
