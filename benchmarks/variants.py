"""Variants of chunks against one plain copy, over a stream of prompts: recomputed tokens, recovered KL and time.

    python benchmarks/variants.py --data ../shared/data/musique_train100.jsonl --questions 20

Every question is asked several times, as different wordings of it would be: a retriever ranks the question's passages,
each time with some noise, and the first ones stand in the prompt in the order of their ranks. All askings but the last
only leave variants; the last one is measured against a full prefill of the same prompt. *Recovered* is the share of the
KL divergence of full reuse of plain KV, on the gold answer, that a method wins back.

Storage is counted in copies of a chunk. With as many copies as there are chunks, plain KV stores all of them, and
variants ``1 / (1 + M)`` of them, the most asked for, with ``M`` variants each. A passage that is not stored is computed
in full, so *computed* counts its tokens as well as recomputed ones. Tokens and KL do not depend on the machine's load,
and seconds to the first token, with the KV in memory, do.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from environment import environment
from evaluation.measure import QuestionRun, run
from evaluation.metrics import mean_kl
from evaluation.questions import Question, read_questions
from evaluation.setting import Setting
from evaluation.summary import bootstrap
from rich.progress import track

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import LoadedModel, load_model
from fused_kv_llm.selectors import CacheCraft

_SETTINGS = Setting()
# The overhead says how much is recomputed; 1 would be full prefill.
_MOST = 0.99
_FIFTEEN = {"recompute_ratio": 0.15}


@dataclass(frozen=True)
class Way:
    """A method: how its prompts are prefilled, with the KV of which engine.

    ``tokens_of`` names a way whose number of recomputed tokens it is given.
    """

    name: str
    engine: str
    options: dict[str, Any]
    tokens_of: str = ""


def ways(alphas: list[float]) -> list[Way]:
    """Return what is compared; full reuse of plain KV, the baseline, comes first."""
    found = [Way("full reuse, plain", "plain", {"recompute_ratio": 0.0})]
    for alpha in alphas:
        fix = {"selector": CacheCraft(alpha), "recompute_ratio": _MOST}
        name = f"variants, alpha {alpha:g}"
        found += [
            Way(name, "variants", fix),
            Way(f"{name}, all layers", "variants", {**fix, "selector": CacheCraft(alpha, focus_window=0)}),
            Way(f"plain, alpha {alpha:g}", "plain", fix),
            Way(f"plain, as many tokens as {name}", "plain", fix, name),
            Way(f"sink_attention, as many tokens as {name}", "plain", {"selector": "sink_attention"}, name),
            Way(f"{name}, equal storage", "few variants", fix),
        ]
    found += [
        Way("full reuse, variants", "variants", {"selector": "cache_craft", "recompute_ratio": 0.0}),
        Way("sink_attention_variants 0.15", "variants", {"selector": "sink_attention_variants", **_FIFTEEN}),
    ]
    return [*found, Way("sink_attention 0.15", "plain", {"selector": "sink_attention", **_FIFTEEN})]


def askings(question: Question, times: int, passages: int, noise: float) -> list[Question]:
    """Return the question with the passages that each asking retrieves, in the order of their noisy ranks."""
    drawn = random.Random(question.id)
    found = []
    for _ in range(times):
        scores = [-math.log(rank) + drawn.gauss(0.0, noise) for rank in range(1, len(question.passages) + 1)]
        order = sorted(range(len(scores)), key=lambda one: -scores[one])
        found.append(replace(question, passages=tuple(question.passages[one] for one in order[:passages])))
    return found


def open_engines(
    stack: ExitStack, loaded: LoadedModel, folder: Path, stream: list[Question], most: int
) -> dict[str, FusedKVEngine]:
    """Return engines with one plain copy of all chunks, with variants beside that, and with as many copies in all."""
    counts = Counter(text for asked in stream for text in asked.passages)
    chunks = [text for text, _ in counts.most_common()]
    few = chunks[: max(1, len(chunks) // (1 + most))]
    engines = {}
    for name, texts, variants in (("plain", chunks, 0), ("variants", chunks, most), ("few variants", few, most)):
        engines[name] = engine = stack.enter_context(
            FusedKVEngine(
                loaded, kv_dir=folder / name.replace(" ", "-"), preprocessing="none", store_misses=False,
                variants=variants,
            )
        )  # fmt: skip
        print(name, engine.build_kv_cache(texts, progress=False).summary(), flush=True)
    return engines


def learn(engines: dict[str, FusedKVEngine], asked: Question) -> None:
    """Answer a prompt as a live request, and wait for what it leaves."""
    for name in ("variants", "few variants"):
        engines[name].generate(asked.prompt("plain"), max_tokens=1, recompute_ratio=0.15)
        engines[name].wait_for_background()


def measure(engines: dict[str, FusedKVEngine], asked: Question, compared: list[Way]) -> dict[str, dict[str, Any]]:
    """Return the record of every way of prefilling one prompt."""
    full = run(engines["plain"], asked, _SETTINGS, recompute_ratio=1.0)
    chunk_tokens = full.report.reused_tokens + full.report.recomputed_tokens
    known = full.report.fresh_tokens + chunk_tokens
    found: dict[str, dict[str, Any]] = {}
    for way in compared:
        options = way.options
        if way.tokens_of:
            # Half a token more, so that rounding does not take one away.
            options = {**options, "recompute_ratio": (found[way.tokens_of]["recomputed"] + 0.5) / chunk_tokens}
        # The first time brings the KV into memory.
        _, got = (run(engines[way.engine], asked, _SETTINGS, **options) for _ in range(2))
        found[way.name] = record(got, full, chunk_tokens, known)
    return found


def record(got: QuestionRun, full: QuestionRun, chunk_tokens: int, known: int) -> dict[str, Any]:
    """Return KL, tokens and what was used; the prompt has `known` tokens besides its header."""
    report = got.report
    missed = known - chunk_tokens
    return {
        "kl": mean_kl(full.log_probs, got.log_probs),
        "ttft_s": got.ttft_s,
        "recomputed": report.recomputed_tokens,
        "computed_share": (report.recomputed_tokens + report.fresh_tokens - missed) / chunk_tokens,
        "variants_used": sum(one["variant"] != "" for one in report.variants),
        "chunks": report.chunks_found,
        "overhead": [one["overhead"] for one in report.variants],
    }


def summarise(records: list[dict[str, dict[str, Any]]], compared: list[Way]) -> list[dict[str, Any]]:
    """Return the means over questions, with intervals of the recovered share."""
    base = [found[compared[0].name]["kl"] for found in records]
    rows = []
    for way in compared:
        mine = [found[way.name] for found in records]
        kl = [one["kl"] for one in mine]
        rows.append({
            "way": way.name,
            "computed": sum(one["computed_share"] for one in mine) / len(mine),
            "recovered": 1 - sum(kl) / sum(base),
            "interval": bootstrap(kl, base, "recovered"),
            "kl": sum(kl) / len(kl),
            "ttft_median_s": statistics.median(one["ttft_s"] for one in mine),
            "variants_used": sum(one["variants_used"] for one in mine) / max(1, sum(one["chunks"] for one in mine)),
            "overhead": sum(map(sum, (one["overhead"] for one in mine)))
                        / max(1, sum(len(one["overhead"]) for one in mine)),
        })  # fmt: skip
    return rows


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--pool", type=int, default=8, help="passages of a question that are ranked")
    parser.add_argument("--passages", type=int, default=5, help="passages of a prompt")
    parser.add_argument("--askings", type=int, default=4, help="of each question; the last one is measured")
    parser.add_argument("--noise", type=float, default=0.5, help="standard deviation, beside the logarithm of a rank")
    parser.add_argument("--variants", type=int, default=3, metavar="M")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--out", type=Path, default=None, help="where the record is written; none by default")
    args = parser.parse_args()
    questions = read_questions(args.data, args.questions, args.pool)
    asked = [askings(question, args.askings, args.passages, args.noise) for question in questions]
    # All questions are asked once, then all again.
    stream = [times[number] for number in range(args.askings) for times in asked]
    compared = ways(args.alphas)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loaded = load_model(args.model, dtype=args.dtype)
        engines = open_engines(stack, loaded, folder, stream, args.variants)
        for one in track(stream[: -len(asked)], description="learning"):
            learn(engines, one)
        stored = {
            name: {"chunks": len(engine.stored_texts()), "bytes": engine.store.stats().tiers["disk"][1],
                   "variants": 0 if engine.corpus.variants is None else engine.corpus.variants.usage()[0]}
            for name, engine in engines.items()
        }  # fmt: skip
        for engine in engines.values():
            # What is measured leaves nothing: the next way would find the variants of this very prompt.
            engine.corpus.close()
        last = track(stream[-len(asked) :], description="measuring")
        records = [measure(engines, one, compared) for one in last]
        rows = summarise(records, compared)
        result = {"environment": environment(), "dtype": str(loaded.dtype), "settings": vars(args) | {
            "data": args.data.stem, "out": None}, "stored": stored, "rows": rows}  # fmt: skip
    print(json.dumps(stored))
    for row in rows:
        low, high = row["interval"]
        print(f"{row['way']:<58} computed {row['computed']:6.1%}  recovered {row['recovered']:6.1%} "
              f"({low:.0%} to {high:.0%})  {row['ttft_median_s']:.3f} s  "
              f"variants {row['variants_used']:.0%}  CFO {row['overhead']:.3f}")  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
