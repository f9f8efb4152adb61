"""Two replicas on Ray Serve: how much of what is asked is resident, and what a killed replica costs.

    python benchmarks/ray_serving.py --data ../shared/data/corpus_squad.jsonl

Questions about sections of articles, eight passages each, come with some of a section's passages; which section is
asked about follows Zipf's law. Each replica has a small memory tier. The same questions are asked of two replicas with
random routing and with routing by chunk, by a few users at once. Then some are asked one by one and compared with one
engine in this process, and a replica is killed while others ask. Needs the extra ``ray``. Writes
``benchmarks/results/ray_serving_cpu.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from environment import environment
from ray_cluster import replica_pids, serving

from fused_kv_llm import FusedKVEngine

RESULTS = Path(__file__).parent / "results" / "ray_serving_cpu.json"
MODEL = "smollm2-135m"
_SECTION = 8


class Questions:
    """Questions about sections of articles, each with passages; the same for the same number.

    Parameters
    ----------
    data : Path
        Passages with titles, a line each.
    sections : int
    passage_chars : int
        Passages are cut off behind so many characters.
    exponent : float
        Of Zipf's law over sections.
    each : int
        Passages of a question, drawn from its section.
    """

    def __init__(self, data: Path, sections: int, passage_chars: int, exponent: float, each: int) -> None:
        by_title: dict[str, list[str]] = defaultdict(list)
        for line in data.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            by_title[row["title"]].append(row["text"][:passage_chars].strip())
        whole = [
            (title, texts[begin : begin + _SECTION])
            for title, texts in sorted(by_title.items())
            for begin in range(0, len(texts) - _SECTION + 1, _SECTION)
        ]
        random.Random(0).shuffle(whole)
        self._sections = whole[:sections]
        self._weights = [1 / (rank + 1) ** exponent for rank in range(len(self._sections))]
        self._each = each

    @property
    def passages(self) -> list[str]:
        """All of them."""
        return [text for _, texts in self._sections for text in texts]

    def body(self, number: int, *, max_tokens: int, stream: bool = False) -> dict[str, Any]:
        """Return a request's body."""
        drawn = random.Random(number)
        (title, texts), *_ = drawn.choices(self._sections, self._weights)
        found = drawn.sample(texts, min(self._each, len(texts)))
        content = "\n\n".join([*found, f"Question {number}: what do these passages say about {title}?"])
        return {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "stream": stream,
                "messages": [{"role": "user", "content": content}]}  # fmt: skip


async def _ask(client: httpx.AsyncClient, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what became of a request: its kind, its answer, and where its KV came from."""
    began = time.perf_counter()
    try:
        response = await client.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return {"kind": type(error).__name__}
    found: dict[str, Any] = {"seconds": time.perf_counter() - began, "kind": str(response.status_code)}
    if response.status_code == 200 and not body["stream"]:
        told = response.json()
        report = told["fused_kv"]
        found |= {"kind": "answered", "text": told["choices"][0]["message"]["content"], "ttft_s": report["ttft_s"],
                  "bytes": report["bytes_loaded"], "chunks": report["chunks_found"]}  # fmt: skip
    elif response.status_code == 200:
        lines = response.text.strip().split("\n\n")
        last = json.loads(lines[-2].removeprefix("data: ")) if len(lines) > 1 else {}
        complete = lines[-1] == "data: [DONE]"
        found["kind"] = f"error event: {last['error']['code']}" if "error" in last else "answered"
        found["kind"] = found["kind"] if complete else "broken off"
    return found


async def asked(url: str, bodies: Sequence[Mapping[str, Any]], users: int) -> list[dict[str, Any]]:
    """Have so many users ask all questions, each one after another; return what became of them, in their order."""
    left = iter(enumerate(bodies))
    found: dict[int, dict[str, Any]] = {}

    async def user(client: httpx.AsyncClient) -> None:
        for number, body in left:
            found[number] = await _ask(client, body)

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        await asyncio.gather(*(user(client) for _ in range(users)))
    return [found[number] for number in sorted(found)]


def resident_share(rows: Sequence[Mapping[str, Any]], warm_up: int) -> dict[str, Any]:
    """Return the share of loaded bytes that were in memory, of the questions after the first, and times."""
    counted = [row for row in rows[warm_up:] if row["kind"] == "answered"]
    tiers: Counter[str] = Counter()
    for row in counted:
        tiers.update(row["bytes"])
    seconds = sorted(row["ttft_s"] for row in counted)
    return {
        "counted": len(counted),
        "kinds": dict(Counter(row["kind"] for row in rows)),
        "bytes": dict(tiers),
        "resident_share": tiers["memory"] / sum(tiers.values()),
        "ttft_p50_s": seconds[len(seconds) // 2],
        "ttft_p95_s": seconds[len(seconds) * 95 // 100],
    }


async def killed(url: str, bodies: Sequence[Mapping[str, Any]], users: int) -> dict[str, Any]:
    """Ask while a replica is killed; every other question is streamed."""
    asking = asyncio.create_task(asked(url, bodies, users))
    await asyncio.sleep(15.0)
    before = replica_pids()
    os.kill(before[0], signal.SIGKILL)
    killed_s = time.perf_counter()
    while len(now := set(replica_pids()) - {before[0]}) < len(before):
        await asyncio.sleep(0.5)
    back_s = time.perf_counter() - killed_s
    rows = await asking
    kinds = Counter((("streamed" if body["stream"] else "whole"), row["kind"])
                    for body, row in zip(bodies, rows, strict=True))  # fmt: skip
    return {
        "requests": len(rows),
        "users": users,
        "replicas": len(before),
        "replicas_again": len(now),
        "process_back_s": round(back_s, 1),
        "outcomes": {f"{how}: {kind}": count for (how, kind), count in sorted(kinds.items())},
    }


def _options(args: argparse.Namespace, kv_dir: Path, routing: str) -> dict[str, Any]:
    engine = {**_engine_options(kv_dir), "memory_bytes": args.memory_bytes}
    return {"engine": engine, "server": {"request_log": "off"}, "replicas": 2, "replica_cpus": 0.5,
            "routing": routing, "stats_period_s": 1.0, "health_timeout_s": 600}  # fmt: skip


def _engine_options(kv_dir: Path) -> dict[str, Any]:
    # What earlier requests left would hide whether chunks are resident.
    return {"model": MODEL, "kv_dir": str(kv_dir), "preprocessing": "none", "store_misses": False,
            "prefix_cache_bytes": 0}  # fmt: skip


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sections", type=int, default=36)
    parser.add_argument("--passage-chars", type=int, default=400)
    parser.add_argument("--exponent", type=float, default=0.7)
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--memory-bytes", default="64MB", help="of each replica's memory tier")
    parser.add_argument("--kv-dir", type=Path, help="a folder to keep the corpus' KV in")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    questions = Questions(args.data, args.sections, args.passage_chars, args.exponent, args.each)
    with tempfile.TemporaryDirectory() as folder:
        kv_dir = args.kv_dir or Path(folder) / "kv"
        measured(args, questions, kv_dir)


def answered_alone(
    kv_dir: Path, passages: Sequence[str], bodies: Sequence[Mapping[str, Any]]
) -> tuple[int, int, list[str]]:
    """Store the corpus, and return its chunks and bytes, and the answers of one engine."""
    with FusedKVEngine(**_engine_options(kv_dir)) as engine:
        engine.build_kv_cache(passages)
        stored = engine.store.stats()
        want = [engine.generate(body["messages"], max_tokens=24, temperature=0).text for body in bodies]
    return stored.chunks, stored.bytes_on_disk, want


def measured(args: argparse.Namespace, questions: Questions, kv_dir: Path) -> None:
    """Measure, and write what is known after each part."""
    bodies = [questions.body(number, max_tokens=4) for number in range(args.questions)]
    singles = [questions.body(number, max_tokens=24) for number in range(10_000, 10_020)]
    # In a process of its own, whose memory is free again when the replicas start.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        chunks, nbytes, want = other.submit(answered_alone, kv_dir, questions.passages, singles).result()
    record: dict[str, Any] = {
        "environment": environment(),
        "model": MODEL,
        "corpus": {"sections": args.sections, "chunks": chunks, "stored_bytes": nbytes},
        "trace": {"questions": args.questions, "zipf_exponent": args.exponent, "passages_each": args.each,
                  "users": args.users, "warm_up": args.questions // 3},
        "memory_bytes_each": args.memory_bytes,
    }  # fmt: skip
    for routing in ("random", "chunks"):
        with serving(_options(args, kv_dir, routing)) as url:
            rows = asyncio.run(asked(url, bodies, args.users))
            record[routing] = resident_share(rows, args.questions // 3)
            _write(args.out, record)
            print(routing, record[routing])
            if routing == "chunks":
                alone = asyncio.run(asked(url, singles, 1))
                same = sum(row.get("text") == text for row, text in zip(alone, want, strict=True))
                record["equal_answers"] = {"asked": len(want), "equal": same}
                load = [questions.body(20_000 + number, max_tokens=32, stream=number % 2 == 0) for number in range(120)]
                record["killed"] = asyncio.run(killed(url, load, 2 * args.users))
    record["ratio"] = record["chunks"]["resident_share"] / record["random"]["resident_share"]
    _write(args.out, record)
    print({name: record[name] for name in ("ratio", "equal_answers", "killed")})


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
