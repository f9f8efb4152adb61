"""Retrieved chunks as they were ranked, and in an order that earlier prompts began with (ContextPilot).

    python benchmarks/chunk_order.py --data ../shared/data/squad10.jsonl

Questions come one after the other, in the file's order, where those about one article stand together.

served: the first of them, answered at ratio 1 and at 0.15, where all chunks are stored, by an engine for each order
with a tree of answered prompts of its own. Tokens do not depend on the machine; seconds do.
judged: those whose passages are moved, at ratio 1. Exact match and F1 of short answers, the negative log-probability of
the gold answer, and KL on the gold answer from full prefill in the given order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import environment
from evaluation.measure import run
from evaluation.metrics import answer_scores, mean_kl
from evaluation.questions import Question, read_questions
from evaluation.setting import Setting

from fused_kv_llm import FusedKVEngine

RATIOS = (1.0, 0.15)
FRAME = "instruct"
ANSWER_TOKENS = 12

_Values = dict[str, list[float]]


def ordered(engine: FusedKVEngine, question: Question) -> Question:
    """Return the question with its passages in the order that the engine proposes."""
    places = engine.order_chunks(question.passages)
    return replace(question, passages=tuple(question.passages[at] for at in places))


def ask(engine: FusedKVEngine, question: Question, ratio: float, values: _Values) -> None:
    """Have a question answered beside what earlier ones have left."""
    answer = engine.generate(question.prompt(FRAME), max_tokens=1, recompute_ratio=ratio)
    values["prefix_cache_tokens"].append(answer.report.prefix_cache_tokens)
    values["computed_tokens"].append(answer.report.computed_tokens)
    values["prompt_tokens"].append(answer.report.prompt_tokens)
    values["ttft_s"].append(answer.report.ttft_s or 0.0)


def judge(engine: FusedKVEngine, given: Question, other: Question, values: dict[str, _Values]) -> None:
    """Add what full prefill answers and thinks of the gold answer, in both orders; trees have no part in it."""
    settings, gold = (
        Setting(FRAME, answer_tokens=ANSWER_TOKENS),
        torch.tensor(engine.token_ids(given.answers[0]))[:, None],
    )
    full = run(engine, given, settings, recompute_ratio=1.0)
    for name, question in (("given", given), ("ordered", other)):
        found = full if name == "given" else run(engine, question, settings, recompute_ratio=1.0)
        values[name]["kl"].append(mean_kl(full.log_probs, found.log_probs))
        values[name]["gold_nll"].append(float(-found.log_probs.gather(1, gold).mean()))
        scores = answer_scores(found.answer, given.answers, full.answer)
        values[name]["em"].append(scores["em"])
        values[name]["f1"].append(scores["f1"])


def summary(values: _Values) -> dict[str, float]:
    """Return means."""
    return {name: round(statistics.mean(found), 4) for name, found in values.items()}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--served", type=int, default=12)
    parser.add_argument("--judged", type=int, default=16)
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="where the record is written; none by default")
    args = parser.parse_args()
    questions = read_questions(args.data, args.questions, args.passages)
    options: dict[str, Any] = {"preprocessing": "none", "store_misses": False, "prefix_cache_bytes": 2**30}
    served: dict[str, _Values] = defaultdict(lambda: defaultdict(list))
    judged: dict[str, _Values] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        loaded: Any = "smollm2-135m"
        engines = {}
        for name in ("given", "ordered"):
            engines[name] = FusedKVEngine(loaded, kv_dir=folder, **options)
            loaded = engines[name].loaded
        known = {text: None for one in questions[: args.served] for text in one.passages}
        engines["given"].build_kv_cache(known, progress=False)
        asked = [(one, ordered(engines["ordered"], one)) for one in questions]
        for ratio in RATIOS:
            for engine in engines.values():
                engine.requests.prefixes.clear()
            for pair in asked[: args.served]:
                for name, question in zip(engines, pair, strict=True):
                    ask(engines[name], question, ratio, served[f"{name}/{ratio:g}"])
        moved = [pair for pair in asked if pair[0].passages != pair[1].passages]
        for given, other in moved[: args.judged]:
            judge(engines["given"], given, other, judged)
        for engine in engines.values():
            engine.close()
    found = {"model": "smollm2-135m", "data": args.data.stem, "questions": len(questions), "passages": args.passages,
             "moved": len(moved), "served_questions": args.served, "judged_questions": min(args.judged, len(moved)),
             "served": {name: summary(one) for name, one in served.items()},
             "judged": {name: summary(one) for name, one in judged.items()}}  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps({**environment(), **found}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
