"""Storage dtypes: bytes a token, load time, time to first token, and what storing does to the answers.

    python benchmarks/compression.py --data ../shared/data/squad10.jsonl

Every passage is prefilled once; its KV is then stored in every dtype, so that nothing else differs. For every
question the distribution over the next token at every position of the gold answer is compared with full prefill's
(KL). The default should be the smallest dtype whose KL at ratio 0.15 is within 5% of float32's. A load is a chunk's
reading and its placing in a request's cache; times to first token are from memory, for prompts of 3,600 tokens.

Records are appended question by question beside the result; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import environment
from evaluation.measure import measure
from evaluation.methods import FULL, Method
from evaluation.questions import Question, read_questions
from evaluation.records import RecordFile, read_records, settings_digest
from evaluation.setting import Setting
from evaluation.summary import bootstrap
from rich.progress import track
from ttft import build_prompt

from fused_kv_kernels import ChunkStack, RotationTable, rotation_table
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.config import (
    DEFAULT_NEIGHBOURS,
    DEFAULT_PREPROCESSING_PROMPTS,
    DEFAULT_RATIO,
    DEFAULT_SELECTOR,
)
from fused_kv_llm.context_shift import shift_name
from fused_kv_llm.demo import drop_page_cache
from fused_kv_llm.model import LoadedModel, load_model
from fused_kv_llm.prompt.texthash import content_hash
from fused_kv_llm.store import STORAGE_DTYPES, ChunkRow, KVStore
from fused_kv_llm.store.format.quantize import stored_bytes_per_token

BOUND = 1.05
Times = dict[str, dict[str, float]]


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="question file")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, DEFAULT_RATIO])
    parser.add_argument("--dtype", default=None, help="in which the model computes")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compression_cpu.json")
    return parser.parse_args()


def build(loaded: LoadedModel, questions: list[Question], kv_dir: Path) -> list[ChunkRow]:
    """Prefill the passages that stand in prompts, and store what came of it in every dtype; return the rows."""
    used = list(dict.fromkeys(text for question in questions for text in question.passages))
    with FusedKVEngine(loaded, kv_dir=kv_dir / "auto", store_misses=False, prefix_cache_bytes=0) as engine:
        print(engine.build_kv_cache(used, preprocess="wait").summary())
        keys = engine.store.keys(engine.identity)
        rows = list(engine.store.rows(keys).values())
        for storage in STORAGE_DTYPES:
            with KVStore(kv_dir / storage, kv_dtype=storage, memory_bytes=0) as store:
                for row in rows:
                    copy_chunk(engine.store, store, row)
    return rows


def copy_chunk(source: KVStore, target: KVStore, row: ChunkRow) -> None:
    """Store a chunk's KV once more, in the dtype of another store, with the shift that belongs to it."""
    if target.contains([row.key]):
        return
    stored = source.open(row.key, row.token_ids)
    if stored is None:
        raise SystemExit(f"chunk {row.key} is gone")
    with stored:
        keys, values = stored.read_layers(0, stored.num_layers)
    target.put(row.key, row.identity, row.text, content_hash(row.text),
               ChunkKV(keys, values, row.token_ids, row.position))  # fmt: skip
    name = shift_name(DEFAULT_NEIGHBOURS, DEFAULT_PREPROCESSING_PROMPTS)
    shift = source.sidecars.read(row.key, name)
    if shift is not None:
        target.sidecars.put(row.key, name, shift, by_rows=True)


def load_times(kv_dir: Path, rows: list[ChunkRow], loaded: LoadedModel, chunks: int = 40) -> Times:
    """Return microseconds a token from a chunk's file to a request's cache, as an engine places it, cached and not."""
    picked = sorted(rows, key=lambda row: len(row.token_ids), reverse=True)[:chunks]
    found: Times = {storage: {} for storage in STORAGE_DTYPES}
    stores = {name: KVStore(kv_dir / name, memory_bytes=0) for name in STORAGE_DTYPES}
    geometry = loaded.geometry
    shape = (2, geometry.num_layers, geometry.room.heads, 2 * len(picked[0].token_ids), geometry.room.key_dim)
    cache = torch.zeros(shape, dtype=loaded.dtype)
    table = rotation_table(torch.tensor([100]), geometry.rotations[0].inv_freq)
    # Dtypes take turns, so that whatever else the machine does meets all of them.
    for state in ("cold", "warm"):
        seconds: dict[str, list[float]] = {name: [] for name in STORAGE_DTYPES}
        for row in picked:
            for name, store in stores.items():
                if state == "cold":
                    drop_page_cache(kv_dir / name / "chunks" / row.key[:2])
                seconds[name].append(_load(store, row, cache, table) / len(row.token_ids) * 1e6)
        for name, values in seconds.items():
            found[name][f"{state}_us_per_token"] = statistics.median(values)
    for store in stores.values():
        store.close()
    return found


def _load(store: KVStore, row: ChunkRow, cache: torch.Tensor, table: RotationTable) -> float:
    stored = store.open(row.key, row.token_ids)
    if stored is None:
        raise SystemExit(f"chunk {row.key} is gone")
    with stored:
        started = time.perf_counter()
        layers = stored.read_stored(0, stored.num_layers)
        scales = None if layers.scales is None else [layers.scales]
        stack = ChunkStack([(layers.keys, layers.values)], [16], [table] * stored.num_layers, scales=scales)
        for layer in range(stored.num_layers):
            stack.place(layer, cache[0, layer], cache[1, layer])
        return time.perf_counter() - started


def first_token_times(engines: dict[str, FusedKVEngine], rows: list[ChunkRow], ratios: list[float],
                      rounds: int = 7) -> Times:  # fmt: skip
    """Return seconds to the first token of a long prompt whose chunks are in memory; dtypes take turns."""
    prompt = build_prompt(engines["float32"], [row.text for row in rows], "What is said of the first?", 3600)
    seconds: dict[tuple[str, float], list[float]] = {}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            for ratio in ratios:
                report = engine.generate(prompt, max_tokens=1, recompute_ratio=ratio).report
                if turn:
                    seconds.setdefault((name, ratio), []).append(report.ttft_s)
    found: Times = {name: {} for name in engines}
    for (name, ratio), values in seconds.items():
        found[name][f"ttft_{ratio:g}_s"] = statistics.median(values)
    return found


def table(records: dict[tuple[str, str], dict[str, Any]], questions: list[Question], ratios: list[float],
          sizes: dict[str, float], times: Times) -> list[dict[str, Any]]:  # fmt: skip
    """Return one row a storage dtype; KL ratios come with bootstrap intervals over questions."""
    rows = []
    for storage in STORAGE_DTYPES:
        row: dict[str, Any] = {"storage": storage, "bytes_per_token": sizes[storage], **times[storage]}
        for ratio in ratios:
            mine, base = (
                np.array([records[q.id, f"{name}/{ratio:g}"]["kl"] for q in questions]) for name in (storage, "float32")
            )
            row[f"kl_{ratio:g}"] = float(mine.mean())
            row[f"kl_over_float32_{ratio:g}"] = float(mine.mean() / base.mean())
            low, high = bootstrap(mine.tolist(), base.tolist(), "recovered")
            row[f"kl_over_float32_{ratio:g}_95"] = [1 - high, 1 - low]
        rows.append(row)
    return rows


def main() -> None:
    """Run the benchmark."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-compression-"))
    kv_dir.mkdir(parents=True, exist_ok=True)
    questions = read_questions(args.data, args.questions, args.passages)
    loaded = load_model(args.model, dtype=args.dtype)
    rows = build(loaded, questions, kv_dir)
    digest = settings_digest(
        data=args.data.stem, model=loaded.fingerprint, dtype=str(loaded.dtype), passages=args.passages
    )
    records = read_records(args.out, digest)
    out = RecordFile(args.out, digest, (0, 1))
    methods = [Method(DEFAULT_SELECTOR, "none", ratio) for ratio in args.ratios]
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                FusedKVEngine(
                    loaded, kv_dir=kv_dir / name, store_misses=False, memory_bytes=256 << 20, prefix_cache_bytes=0
                )
            )
            for name in STORAGE_DTYPES
        }
        for question in track([q for q in questions if (q.id, FULL.key) not in records], description=args.data.stem):
            out.append(question.id, one_question(engines, question, methods))
        times = first_token_times(engines, rows, args.ratios)
        geometry = loaded.geometry
        layers, heads, dim = geometry.num_layers, geometry.room.heads, geometry.room.key_dim
    sizes = {name: stored_bytes_per_token(name, layers, heads, dim, dim) for name in STORAGE_DTYPES}
    for name, more in load_times(kv_dir, rows, loaded).items():
        times[name] |= more
    found = table(read_records(args.out, digest), questions, args.ratios, sizes, times)
    within = [row for row in found if row[f"kl_over_float32_{DEFAULT_RATIO:g}"] <= BOUND]
    result = {
        "environment": environment(), "data": args.data.stem, "questions": len(questions), "passages": args.passages,
        "model": loaded.model_id, "compute_dtype": str(loaded.dtype), "selector": DEFAULT_SELECTOR,
        "smallest_within_5_percent": min(within, key=lambda row: row["bytes_per_token"])["storage"], "rows": found,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def one_question(engines: dict[str, FusedKVEngine], question: Question, methods: list[Method]) -> dict[str, Any]:
    """Return the record of every storage dtype and ratio; full prefill runs once."""
    fake = {"none": engines["float32"], **engines}
    todo = [Method(m.selector, name, m.ratio) for name in STORAGE_DTYPES for m in methods]
    measured = measure(fake, question, todo, Setting())
    return {
        FULL.key if method == FULL else f"{method.preprocessing}/{method.ratio:g}": record
        for method, record in measured.items()
    }


if __name__ == "__main__":
    main()
