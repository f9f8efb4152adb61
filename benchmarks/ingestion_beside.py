"""Ingestion beside requests of the same engine, and beside another process that keeps the cores busy.

    python benchmarks/ingestion_beside.py --data ../shared/data/squad10.jsonl

One user asks one question after another, with ten passages each, while a corpus is ingested (first pass), and while
none is. "quiet" has ingestion wait until there was no request for 0.1 s, as it did before it got a share of the time.
The other process has two threads; "crowded" says whether OpenMP's workers may sleep early beside it.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from busy import busy_process
from copied_store import copied_store
from environment import environment
from evaluation.questions import read_corpus, read_questions
from serving_systems import of_engine

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import PieceSpeed
from fused_kv_llm.serving.ingestion_pieces import IngestionPieces

_AT_ONCE = 16


class QuietPieces(IngestionPieces):
    """The rule of before: whole batches, once there was no request for a moment."""

    def piece_tokens(self, most: int, speed: PieceSpeed | None = None) -> int:
        """Return `most`."""
        return most

    def due_s(self, *, fusing: bool, loading: bool, decoding: bool) -> float:
        """Return the seconds until it was quiet for long enough."""
        due_s = super().due_s(fusing=False, loading=False, decoding=False)
        if due_s == float("inf") or fusing or loading or decoding:
            return float("inf")
        return max(0.0, self._request_s + 0.1 - time.perf_counter())


def timed(engine: FusedKVEngine, prompt: str, max_tokens: int) -> tuple[float, float]:
    """Return the seconds to the first token, and to the last."""
    started_s = time.perf_counter()
    token_s = [time.perf_counter() - started_s for _ in of_engine(engine, max_tokens)(prompt)]
    return token_s[0], token_s[-1]


def ask(engine: FusedKVEngine, prompts: list[str], max_tokens: int) -> dict[str, float]:
    """Ask one question after another."""
    started_s = time.perf_counter()
    found = [timed(engine, prompt, max_tokens) for prompt in prompts]
    firsts = sorted(first for first, _ in found)
    return {
        "requests": len(found),
        "wall_s": time.perf_counter() - started_s,
        "ttft_p50_s": firsts[len(firsts) // 2],
        "ttft_p95_s": firsts[min(len(firsts) - 1, len(firsts) * 95 // 100)],
        "answer_mean_s": sum(whole for _, whole in found) / len(found),
    }


class Corpus:
    """New chunks, as many as are asked for."""

    def __init__(self, texts: list[str]) -> None:
        self._texts: Iterator[str] = iter(texts)

    def ingest(self, engine: FusedKVEngine, count: int) -> float:
        """Ingest so many more, and return chunks a second."""
        texts = [next(self._texts) for _ in range(count)]
        started_s = time.perf_counter()
        engine.build_kv_cache(texts, preprocess="later", progress=False)
        return count / (time.perf_counter() - started_s)


def beside(engine: FusedKVEngine, corpus: Corpus, prompts: list[str], max_tokens: int) -> dict[str, float]:
    """Ask while the corpus is ingested; chunks are counted as they are stored."""
    over = threading.Event()

    def ingest() -> None:
        while not over.is_set():
            corpus.ingest(engine, _AT_ONCE)

    thread = threading.Thread(target=ingest)
    thread.start()
    time.sleep(1.0)
    stored, started_s = len(engine.stored_texts()), time.perf_counter()
    found = ask(engine, prompts, max_tokens)
    found["chunks_per_s"] = (len(engine.stored_texts()) - stored) / (time.perf_counter() - started_s)
    over.set()
    thread.join()
    return found


def measure(engine: FusedKVEngine, corpus: Corpus, prompts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Measure all."""
    loop = engine.requests._loop
    timed(engine, prompts[0], 4)
    corpus.ingest(engine, _AT_ONCE)
    alone = corpus.ingest(engine, args.chunks)
    rows: list[dict[str, Any]] = []
    for max_tokens in args.max_tokens:
        idle = ask(engine, prompts, max_tokens)
        rows.append({"max_tokens": max_tokens, "ingestion": "none", **idle})
        for name, kind in (("shared", IngestionPieces), ("quiet", QuietPieces)):
            loop._pieces = kind()
            row = beside(engine, corpus, prompts, max_tokens)
            row["ttft_p50_factor"] = row["ttft_p50_s"] / idle["ttft_p50_s"]
            row["ttft_p95_factor"] = row["ttft_p95_s"] / idle["ttft_p95_s"]
            row["speed_share"] = row["chunks_per_s"] / alone
            rows.append({"max_tokens": max_tokens, "ingestion": name, **row})
            print(json.dumps(rows[-1]), flush=True)
        loop._pieces = IngestionPieces()
    time.sleep(10.0)  # until batches are as large as without requests
    busy = {"alone": corpus.ingest(engine, args.chunks)}
    look = loop.scheduler.means.cores.look
    for name, crowded in (("crowded", True), ("not_crowded", False)):
        loop.scheduler.means.cores.look = look if crowded else lambda: None  # type: ignore[method-assign]
        with busy_process(2):
            time.sleep(0.5)
            busy[name] = corpus.ingest(engine, args.chunks // 2)
        loop.scheduler.means.cores.end()
    factors = {name: busy["alone"] / speed for name, speed in busy.items()}
    return {"chunks_per_s_alone": alone, "rows": rows, "busy_chunks_per_s": busy, "busy_factor": factors}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a question file")
    parser.add_argument("--kv-dir", type=Path, default=None, help="a store with the questions' chunks; it is copied")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=32, help="chunks of an ingestion alone")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ingestion_beside_cpu.json")
    args = parser.parse_args()
    with FusedKVEngine(
        "smollm2-135m",
        kv_dir=copied_store(args.kv_dir),
        memory_bytes=2 * 2**30,
        store_misses=False,
        prefix_cache_bytes=0,
    ) as engine:
        prompts = [question.prompt("instruct") for question in read_questions(args.data, args.requests, 10)]
        texts = list(read_corpus(args.data))
        used = [text for text in texts if any(text in prompt for prompt in prompts)]
        print(engine.build_kv_cache(used, preprocess="wait").summary())
        stored = set(engine.stored_texts())
        result = measure(engine, Corpus([text for text in texts if text.strip() not in stored]), prompts, args)
    result = {"environment": environment(), "model": "smollm2-135m", **result}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
