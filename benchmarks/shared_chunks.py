"""Decoding over chunks that requests share, against private copies of them: time and memory, on a CPU.

    python benchmarks/shared_chunks.py
    python benchmarks/shared_chunks.py --requests 1 8 --dtypes bfloat16 float32
    python benchmarks/shared_chunks.py --engine --requests 8

Requests share ten chunks of 200 tokens, of which each has recomputed 15% and asks a question of 50 tokens;
SmolLM2-135M's shape. `shared` is one step of all layers with `decode_views`: chunks as they were prefilled, context
shifts in eight bits, what deviation transfer adds as vectors, and recomputed tokens in a cache of the request's own;
and once more with plain chunks, that is without shifts and vectors.
`private` is the same step with `decode_attention`, each request with a cache into which all that was written. Both take
turns, and the shortest of the rounds counts.

With ``--engine`` whole requests are compared, with ``share_chunk_kv="always"`` and ``"never"``: SmolLM2 answers so many
questions about ten passages at once, with 64 tokens each. What counts is how fast tokens come while all answers are
being written, the best of the rounds, and the memory of a request that comes after the first.

One bound is checked: a further request takes at most 0.4 of the memory of a private copy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from environment import environment

from fused_kv_kernels import (
    ChunkView,
    DecodeCaches,
    DecodeViews,
    LayerRotations,
    SequenceView,
    SharedChunk,
    decode_attention,
    decode_views,
)
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import handbook_passages

MOST_OF_A_PRIVATE_COPY = 0.4
LAYERS, Q_HEADS, KV_HEADS, DIM = 30, 9, 3, 64
CHUNKS, TOKENS, QUESTION, SHARE = 10, 200, 50, 0.15
ANSWER, END = 64, 2


@dataclass(frozen=True)
class Contest:
    """Both ways of one step, and the bytes that a request takes beside what is shared."""

    runs: dict[str, Callable[[], torch.Tensor]]
    private_nbytes: int
    own_nbytes: int
    shared_nbytes: int


def make_chunk(dtype: torch.dtype, plain: bool) -> SharedChunk:
    """Return a chunk of random KV, with a shift unless it is plain."""
    keys, values = torch.randn(2, LAYERS, KV_HEADS, TOKENS, DIM).to(dtype)
    if plain:
        return SharedChunk(keys, values)
    bytes_ = torch.randint(-127, 128, (2, *keys.shape), dtype=torch.int8)
    scales = torch.rand(2, *keys.shape[:3], 1) / 500
    return SharedChunk(keys, values, ((bytes_[0], scales[0]), (bytes_[1], scales[1])))


def make_request(chunks: list[SharedChunk], rotations: LayerRotations, dtype: torch.dtype, plain: bool) -> SequenceView:
    """Return a request over all chunks in an order of its own."""
    views = []
    for place, number in enumerate(torch.randperm(CHUNKS).tolist()):
        hidden = torch.randperm(TOKENS)[: round(SHARE * TOKENS)].sort().values
        weights = None if plain else torch.rand(LAYERS, 2)
        vectors = None if plain else tuple(torch.randn(2, LAYERS, KV_HEADS, DIM) / 10)
        start = place * TOKENS
        views.append(ChunkView(chunks[number], start, start - 30 * number, weights, vectors, hidden))
    own = torch.randn(2, LAYERS, 1, KV_HEADS, round(SHARE * TOKENS) * CHUNKS + QUESTION + 64, DIM).to(dtype)
    return SequenceView(views, own[0], own[1], rotations)


def contest(requests: int, dtype: torch.dtype, plain: bool) -> Contest:
    """Return both ways of a step of so many requests."""
    torch.manual_seed(0)
    inv_freq = 10_000.0 ** -(torch.arange(0, DIM, 2) / DIM)
    rotations = LayerRotations([inv_freq] * LAYERS)
    chunks = [make_chunk(dtype, plain) for _ in range(CHUNKS)]
    views = [make_request(chunks, rotations, dtype, plain) for _ in range(requests)]
    length = CHUNKS * TOKENS + QUESTION
    caches = [tuple(torch.randn(2, LAYERS, 1, KV_HEADS, length + 64, DIM).to(dtype)) for _ in range(requests)]
    heads = (Q_HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(1, requests, count, DIM).to(dtype).transpose(1, 2) for count in heads)
    own_rows = [round(SHARE * TOKENS) * CHUNKS + QUESTION] * requests

    def shared() -> torch.Tensor:
        step = DecodeViews(views, own_rows)
        return [decode_views(q, k, v, step, layer, DIM**-0.5) for layer in range(LAYERS)][-1]

    def private() -> torch.Tensor:
        step = DecodeCaches([(keys, values) for keys, values in caches], [length] * requests)
        return [decode_attention(q, k, v, step, layer, DIM**-0.5) for layer in range(LAYERS)][-1]

    return Contest(
        {"shared": shared, "private": private},
        sum(part.nbytes for part in caches[0]),
        views[0].own_nbytes,
        sum(chunk.nbytes for chunk in chunks),
    )


def measure(requests: int, dtype: torch.dtype, plain: bool, rounds: int) -> dict[str, Any]:
    """Return the least seconds of both ways, and the bytes that they take."""
    found = contest(requests, dtype, plain)
    times: dict[str, list[float]] = {name: [] for name in found.runs}
    for turn in range(rounds + 1):
        for name, run in found.runs.items():
            started = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - started)
    seconds = {name: min(each) for name, each in times.items()}
    further = found.own_nbytes / found.private_nbytes
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "requests": requests,
        "plain": plain,
        "seconds": seconds,
        "times_private": seconds["private"] / seconds["shared"],
        "private_nbytes": requests * found.private_nbytes,
        "shared_nbytes": found.shared_nbytes + requests * found.own_nbytes,
        "further_request": further,
        "holds": further <= MOST_OF_A_PRIVATE_COPY,
    }


def describe(r: dict[str, Any]) -> str:
    """Return one measurement as a line."""
    ms = {name: f"{1000 * found:.1f} ms" for name, found in r["seconds"].items()}
    mb = {name: f"{r[f'{name}_nbytes'] / 2**20:.0f} MiB" for name in ("shared", "private")}
    return (
        f"{r['dtype']}{', plain chunks' if r['plain'] else ''}, {r['requests']} requests: shared {ms['shared']} in "
        f"{mb['shared']}, private {ms['private']} in {mb['private']} ({r['times_private']:.2f}x as fast); a further "
        f"request takes {r['further_request']:.2f} of a private copy, at most {MOST_OF_A_PRIVATE_COPY}: "
        f"{'holds' if r['holds'] else 'DOES NOT HOLD'}"
    )


def answers_at_once(engine: FusedKVEngine, prompts: list[str]) -> dict[str, float]:
    """Return tokens a second while all prompts are answered, and the most bytes that one has for itself."""
    moments: list[list[float]] = [[] for _ in prompts]
    reports = [None] * len(prompts)

    def ask(number: int) -> None:
        handle = engine.submit(prompts[number], max_tokens=ANSWER, constraint=goes_on)
        for piece in handle.pieces():
            moments[number].append(time.perf_counter())
            reports[number] = piece.report or reports[number]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    from_s, to_s = max(one[0] for one in moments), min(one[-1] for one in moments)
    count = sum(from_s < moment <= to_s for one in moments for moment in one)
    own = max(report.own_kv_bytes for report in reports if report is not None)
    shared = max(report.shared_kv_bytes for report in reports if report is not None)
    return {"tokens_per_s": count / (to_s - from_s), "own_nbytes": own, "shared_nbytes": shared}


def goes_on(token_ids: Any, logits: torch.Tensor) -> torch.Tensor:
    """Keep an answer from ending: all have the same length."""
    logits[END] = -torch.inf
    return logits


def measure_engine(requests: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Return tokens a second and bytes of both ways, which take turns."""
    passages = handbook_passages()[:CHUNKS]
    questions = [f"What is said about ferries, part {number}?" for number in range(requests)]
    prompts = ["Context:\n" + "\n\n".join(passages[n % CHUNKS :] + passages[: n % CHUNKS]) + f"\n\n{question}"
               for n, question in enumerate(questions)]  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {"always": [], "never": []}
    with tempfile.TemporaryDirectory() as folder:
        options = {"kv_dir": folder, "dtype": dtype, "max_num_seqs": requests, "prefix_cache_bytes": 0}
        engines = {how: FusedKVEngine("smollm2-135m", share_chunk_kv=how, **options) for how in found}
        engines["never"].build_kv_cache(passages, preprocess="wait", progress=False)
        for turn in range(rounds + 1):
            for how, engine in engines.items():
                one = answers_at_once(engine, prompts)
                if turn:
                    found[how].append(one)
        for engine in engines.values():
            engine.close()
    best = {how: max(found[how], key=lambda one: one["tokens_per_s"]) for how in found}
    further = best["always"]["own_nbytes"] / best["never"]["own_nbytes"]
    return {"dtype": dtype, "requests": requests, **best, "further_request": further,
            "holds": further <= MOST_OF_A_PRIVATE_COPY}  # fmt: skip


def describe_engine(r: dict[str, Any]) -> str:
    """Return one measurement as a line."""
    rates = [r[how]["tokens_per_s"] for how in ("always", "never")]
    return (
        f"engine, {r['dtype']}, {r['requests']} requests: shared {rates[0]:.0f} tokens/s, private {rates[1]:.0f} "
        f"({rates[0] / rates[1]:.2f}x as fast); a further request takes {r['further_request']:.2f} of a private copy, "
        f"at most {MOST_OF_A_PRIVATE_COPY}: {'holds' if r['holds'] else 'DOES NOT HOLD'}"
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--engine", action="store_true", help="compare whole requests")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "shared_chunks.json")
    args = parser.parse_args()
    records = []
    for dtype in args.dtypes:
        for requests in args.requests:
            if args.engine:
                records.append(measure_engine(requests, dtype, args.rounds))
                print(describe_engine(records[-1]), flush=True)
                continue
            for plain in (False, True):
                records.append(measure(requests, getattr(torch, dtype), plain, args.rounds))
                print(describe(records[-1]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"environment": environment(), "records": records}, indent=1))


if __name__ == "__main__":
    main()
