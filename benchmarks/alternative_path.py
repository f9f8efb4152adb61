"""Chunks of which some are known and some were never ingested: one copy of each, against a plain prefix cache.

    python benchmarks/alternative_path.py

FusionRAG's simulation of storage efficiency (section 5.3.3): 1,000 queries; 60 % of their chunks are in the knowledge
base, 30 % are uploads that queries share, 10 % are in one query only. Both are real engines of a small random model.

prefix: an engine at ratio 1 whose tree of answered prompts is large enough for all. A chunk is a hit if the prompt
begins with the same chunks as an earlier one up to it. Known chunks are in it, each right behind the system prompt.
chunks: an engine at ratio 0.15 that has ingested the known chunks, and is told of retrieved ones; its tree is small.

A redundant prefill computes a chunk whose KV was computed before, by an ingestion or in another prompt. Counts do not
depend on the machine. Real model: SmolLM2 in float32, what taking a chunk from an answered prompt saves and changes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from environment import environment
from random_model import SHAPE_TOY, build_model, random_words, word_tokenizer

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import handbook_passages
from fused_kv_llm.offline import Ingestor

WORDS = 5000
CHUNK_WORDS = 32
SHARES = {"known": 0.6, "shared": 0.3, "unique": 0.1}
PAPER = {"storage_saved": 0.710, "redundant_saved": 0.823, "hit_rate": 0.779, "redundant_of_baseline": 4036}
SYSTEM = " ".join(f"w{word}" for word in range(16))
QUESTION_WORDS = 8


def draw_queries(count: int, k: int, known: int, shared: int, seed: int = 0) -> tuple[list[str], list[list[str]]]:
    """Return the knowledge base, and the chunks of every query; Zipf's law with exponent 1 within each kind."""
    rng, names = random.Random(seed), itertools.count()
    pools = {kind: [_chunk(next(names)) for _ in range(size)] for kind, size in (("known", known), ("shared", shared))}

    def one() -> str:
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        if kind == "unique":
            return _chunk(next(names))
        pool = pools[kind]
        return rng.choices(pool, [1 / (rank + 1) for rank in range(len(pool))])[0]

    queries = []
    for _ in range(count):
        drawn = dict[str, None]()
        while len(drawn) < k:
            drawn[one()] = None
        queries.append(list(drawn))
    return pools["known"], queries


def _chunk(name: int) -> str:
    return random_words(CHUNK_WORDS, WORDS, name)


def question(number: int) -> str:
    """Return a question that nobody else asks."""
    return random_words(QUESTION_WORDS, WORDS, 10**6 + number)


def make_engine(folder: str, **options: Any) -> FusedKVEngine:
    """Return an engine of a small random model whose template has a system prompt."""
    torch.manual_seed(0)
    model = build_model(SHAPE_TOY, WORDS + 2, torch.device("cpu"), torch.float32)
    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = SYSTEM + " {% for message in messages %}{{ message['content'] }}{% endfor %} w16"
    return FusedKVEngine(model, tokenizer=tokenizer, kv_dir=folder, preprocessing="none", **options)


@contextmanager
def prefilled() -> Iterator[Counter[str]]:
    """Count the chunks that ingestion computes, by text."""
    counts, real = Counter[str](), Ingestor._prefill

    def counting(self: Ingestor, batch: Any) -> Any:
        counts.update(chunk.text for chunk in batch)
        return real(self, batch)

    with mock.patch.object(Ingestor, "_prefill", counting):
        yield counts


def replay_prefix(known: list[str], queries: list[list[str]]) -> dict[str, Any]:
    """Ask all queries of a plain prefix cache."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"recompute_ratio": 1.0, "store_misses": False, "prefix_cache_bytes": 2**32}
        with make_engine(folder, **options) as engine:
            for chunk in known:
                engine.generate(f"{chunk} {question(0)}", max_tokens=1)
            header, seen = len(engine._parts.prefix.token_ids), set(known)
            hits = redundant = computed = 0
            for number, chunks in enumerate(queries):
                report = engine.generate(" ".join([*chunks, question(number)]), max_tokens=1).report
                found = min(len(chunks), max(0, report.prefix_tokens - header) // CHUNK_WORDS)
                hits += found
                redundant += sum(chunk in seen for chunk in chunks[found:])
                computed += report.computed_tokens
                seen.update(chunks)
            nbytes = engine.requests.prefixes.nbytes
    total = sum(map(len, queries))
    return {"hit_rate": hits / total, "redundant_prefills": redundant, "kv_bytes": nbytes,
            "computed_tokens": computed / len(queries)}  # fmt: skip


def replay_chunks(known: list[str], queries: list[list[str]], tree_bytes: int) -> dict[str, Any]:
    """Ask all queries of an engine that keeps one copy of a chunk."""
    with tempfile.TemporaryDirectory() as folder, prefilled() as ingested:
        options: dict[str, Any] = {"recompute_ratio": 0.15, "prefix_cache_bytes": tree_bytes}
        with make_engine(folder, **options) as engine:
            engine.build_kv_cache(known, progress=False)
            hits = computed = 0
            live = Counter[str]()
            for number, chunks in enumerate(queries):
                keys = engine.prefetch(chunks)
                report = engine.generate(" ".join([*chunks, question(number)]), max_tokens=1).report
                engine.wait_for_background()
                hits += report.chunks_found
                live.update(chunk for chunk, key in zip(chunks, keys, strict=True) if key is None)
                computed += report.computed_tokens
            stats, distinct = engine.store.stats(), {*known, *itertools.chain(*queries)}
            if stats.chunks != len(distinct):
                raise RuntimeError(f"{stats.chunks} copies of {len(distinct)} chunks")
            token_bytes = engine.loaded.geometry.kv_bytes_per_token(engine.loaded.dtype)
            tree = engine.requests.prefixes.nbytes
            again = sum((live + ingested)[chunk] - 1 for chunk in live)
    total = sum(map(len, queries))
    return {"hit_rate": hits / total, "redundant_prefills": again, "chunk_kv_bytes": stats.tokens * token_bytes,
            "tree_bytes": tree, "kv_bytes": stats.tokens * token_bytes + tree, "file_bytes": stats.bytes_on_disk,
            "new_chunks": len(live), "adopted": sum(not ingested[chunk] for chunk in live),
            "computed_tokens": computed / len(queries)}  # fmt: skip


def simulate(count: int, k: int, known: int, shared: int) -> dict[str, Any]:
    """Return both replays and what the second saves."""
    base, queries = draw_queries(count, k, known, shared)
    prefix = replay_prefix(base, queries)
    # A fiftieth of what the prefix cache has come to.
    chunks = replay_chunks(base, queries, prefix["kv_bytes"] // 50)
    return {
        "queries": count, "chunks_each": k, "known": known, "shared": shared, "prefix": prefix, "chunks": chunks,
        "storage_saved": 1 - chunks["kv_bytes"] / prefix["kv_bytes"],
        "redundant_saved": 1 - chunks["redundant_prefills"] / prefix["redundant_prefills"],
        "hit_rate": chunks["hit_rate"],
    }  # fmt: skip


def real_model(repeats: int) -> dict[str, Any]:
    """Return what taking a chunk from an answered prompt saves, and how far it is from an ingested one."""
    passages, asked = handbook_passages()[:8], "What is said here?"
    seconds: dict[str, list[float]] = {"adopt": [], "prefill": [], "ttft_known": [], "ttft_unknown": []}
    difference = 0.0
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"dtype": "float32", "preprocessing": "none", "kv_dir": folder}
        engine = FusedKVEngine("smollm2-135m", **options)
        with engine:
            engine.build_kv_cache(passages[3:], progress=False)
            for upload in passages[:repeats]:
                later = "\n\n".join([*passages[3:7], upload, asked])
                engine.clear_prefix_cache()
                seconds["ttft_unknown"].append(engine.generate(later, max_tokens=1).report.ttft_s or 0.0)
                engine.clear_prefix_cache()
                seconds["prefill"].append(_timed(engine, [upload]))
                want = _kv(engine, upload)
                engine.delete_chunks([upload])
                engine.generate(f"{upload}\n\n{asked}", max_tokens=1)
                seconds["adopt"].append(_timed(engine, [upload]))
                difference = max(difference, float((_kv(engine, upload) - want).abs().max()))
                engine.clear_prefix_cache()
                seconds["ttft_known"].append(engine.generate(later, max_tokens=1).report.ttft_s or 0.0)
                engine.delete_chunks([upload])
    medians = {f"{name}_s": round(statistics.median(times), 4) for name, times in seconds.items()}
    return {
        "model": "smollm2-135m",
        "dtype": "float32",
        "repeats": repeats,
        **medians,
        "largest_difference": difference,
    }


def _timed(engine: FusedKVEngine, texts: list[str]) -> float:
    started = time.perf_counter()
    engine.build_kv_cache(texts, preprocess="later", progress=False)
    return time.perf_counter() - started


def _kv(engine: FusedKVEngine, text: str) -> torch.Tensor:
    stored = engine.store.open(str(engine.chunk_id(text)), engine.token_ids(text))
    if stored is None:
        raise RuntimeError("the chunk was not stored")
    with stored:
        return torch.cat(stored.read_layers(0, stored.num_layers)).clone()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--known", type=int, default=300)
    parser.add_argument("--shared", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3, help="of the real model; 0 leaves it out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "alternative_path.json")
    args = parser.parse_args()
    simulation = simulate(args.queries, args.k, args.known, args.shared)
    found: dict[str, Any] = {"paper": PAPER, "simulation": simulation}
    if args.repeats:
        found["real_model"] = real_model(args.repeats)
    args.out.write_text(json.dumps({**environment(), **found}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
