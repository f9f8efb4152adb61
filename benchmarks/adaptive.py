"""Adaptive recomputation against fixed ratios: how far the worst requests are off, at the same mean recomputation.

    python benchmarks/adaptive.py --data ../shared/data/squad10.jsonl ../shared/data/musique_train100.jsonl

Every question is asked with full prefill, at fixed ratios, and adaptively with several targets. The KL divergence from
full prefill is taken along two texts: the gold answer, and the first tokens of full prefill's own greedy answer, which
is what a user would be given. A fixed ratio of the same mean recomputation is interpolated between those measured.
The estimate is ``FusionReport.expected_divergence`` of adaptive requests; its rank correlation with the true
divergence is Spearman's, and that of requests which all went to one ratio compares all of them alike. Records are
appended question by question: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import environment
from evaluation.metrics import mean_kl
from evaluation.questions import FRAMES, PARTS, Question
from evaluation.records import RecordFile, settings_digest
from evaluation.run import Bench, open_bench
from evaluation.setting import CORPORA, Setting
from evaluation.summary import rank_correlation
from torch.nn.functional import log_softmax

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_PREPROCESSING, EngineConfig
from fused_kv_llm.model import load_model
from fused_kv_llm.online import round_ratios
from fused_kv_llm.online.adaptive import expected_after
from fused_kv_llm.online.draft import DRAFT_TOKENS

RATIOS = (0.05, 0.15, 0.2, 0.3, 0.5)
TARGETS = (0.005, 0.007, 0.009, 0.01, 0.012, 0.02)
# Every request goes to this ratio, so that the estimate can be compared over all of them.
ESTIMATED = 0.15
ANSWER_TOKENS = 8
ALONG = ("answer", "gold")


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="question files")
    parser.add_argument("--questions", type=int, default=40, help="first questions of every file")
    parser.add_argument("--passages", type=int, default=10)
    parser.add_argument("--frame", choices=FRAMES, default="short")
    parser.add_argument("--part", choices=PARTS, default="all")
    parser.add_argument("--corpus", choices=CORPORA, default="all", help="as of quality.py")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS, metavar="NATS")
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "adaptive_cpu.json")
    return parser.parse_args()


def rounds_name() -> str:
    """Return the name that records of these rounds, draft and estimate have; with others, all is asked anew."""
    estimate = [expected_after(ratio, 0.01, entropy) for ratio in (0.1, 0.3) for entropy in (0.5, 2.0)]
    rounds = round_ratios(EngineConfig().adaptive_cap)
    return f"adaptive {settings_digest(rounds=rounds, drafted=DRAFT_TOKENS, estimate=estimate)}"


def distributions(engine: FusedKVEngine, prompt: str, texts: dict[str, list[int]], **options: Any) -> dict[str, Any]:
    """Prefill a prompt once; return log-probabilities ``[tokens, vocabulary]`` along each text, and the report."""
    fused, report = engine.prefill(prompt, max_tokens=64, **options)
    try:
        length, found = fused.cache.length, {}
        for name, ids in texts.items():
            rest = [fused.append(engine.loaded, ids[:-1])] if len(ids) > 1 else []
            found[name] = log_softmax(torch.cat((fused.logits[None], *rest)), dim=-1)
            fused.cache.length = length
    finally:
        fused.cache.release()
    return {**found, "report": report}


def ways_of_asking(bench: Bench, adaptive: dict[str, FusedKVEngine]) -> dict[str, tuple[FusedKVEngine, dict[str, Any]]]:
    """Return the engine and the options of every way of asking."""
    fixed = {f"fixed {ratio:g}": (bench.engines[DEFAULT_PREPROCESSING], {"recompute_ratio": ratio}) for ratio in RATIOS}
    return fixed | {name: (engine, {"recompute_ratio": "adaptive"}) for name, engine in adaptive.items()}


def ask(
    bench: Bench, ways: dict[str, tuple[FusedKVEngine, dict[str, Any]]], question: Question, setting: Setting
) -> dict[str, dict[str, Any]]:
    """Return the record of each of these ways of asking a question."""
    engine, prompt = bench.engines[DEFAULT_PREPROCESSING], question.prompt(setting.frame)
    answer = engine.generate(prompt, max_tokens=ANSWER_TOKENS, recompute_ratio=1.0).token_ids
    texts = {"answer": list(answer), "gold": engine.token_ids(question.answers[0])}
    full = distributions(bench.engine, prompt, texts, recompute_ratio=1.0)
    records = {}
    for name, (one, options) in ways.items():
        got = distributions(one, prompt, texts, **options)
        report = got["report"]
        records[name] = {
            **{along: mean_kl(full[along], got[along]) for along in ALONG},
            "share": report.recomputed_tokens / max(1, report.recomputed_tokens + report.reused_tokens),
            "expected_divergence": report.expected_divergence,
            "seconds": sum(report.seconds.values()),
        }
    return records


def summarise(records: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for every way and text."""
    rows = []
    for name in records[0]:
        for along in ALONG:
            kl = np.array([record[name][along] for record in records])
            shares = [record[name]["share"] for record in records]
            row = {"way": name, "along": along, "questions": len(records), "mean_share": float(np.mean(shares)),
                   "mean": float(kl.mean()), "p90": float(np.quantile(kl, 0.9)), "p95": float(np.quantile(kl, 0.95)),
                   "median_s": float(np.median([r[name]["seconds"] for r in records]))}  # fmt: skip
            if name.startswith("adaptive"):
                expected = [record[name]["expected_divergence"] for record in records]
                row["rank_correlation"] = rank_correlation(expected, kl.tolist())
            rows.append(row)
    for row in rows:
        if row["way"].startswith("adaptive"):
            fixed = [one for one in rows if one["along"] == row["along"] and one["way"].startswith("fixed")]
            shares = [one["mean_share"] for one in fixed]
            for figure in ("mean", "p90", "p95"):
                row[f"fixed_{figure}"] = float(np.interp(row["mean_share"], shares, [one[figure] for one in fixed]))
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = ["| way | along | recomputed | KL, mean | p90 | p95 | p95, fixed at the same mean | rank correlation | s |",
             "|---|---|--:|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for row in rows:
        fixed = f"{row['fixed_p95']:.4f}" if "fixed_p95" in row else ""
        rank = f"{row['rank_correlation']:.2f}" if row.get("rank_correlation") is not None else ""
        figures = " | ".join(f"{row[name]:.4f}" for name in ("mean", "p90", "p95"))
        share, seconds = f"{row['mean_share']:.1%}", f"{row['median_s']:.2f}"
        lines.append(f"| {row['way']} | {row['along']} | {share} | {figures} | {fixed} | {rank} | {seconds} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-adaptive-"))
    setting = Setting(frame=args.frame, passages=args.passages, part=args.part, corpus=args.corpus)
    everything = []
    with ExitStack() as stack:
        loaded = load_model("smollm2-135m")
        bench = open_bench(stack, loaded, kv_dir, [DEFAULT_PREPROCESSING])
        options = {f"adaptive {target:g}": {"adaptive_target": target} for target in args.targets}
        options[f"adaptive, all to {ESTIMATED:g}"] = {"adaptive_target": 1e-9, "adaptive_cap": ESTIMATED}
        adaptive = {
            name: stack.enter_context(FusedKVEngine(loaded, kv_dir=kv_dir, store_misses=False, memory_bytes=0, **those))
            for name, those in options.items()
        }
        ways = ways_of_asking(bench, adaptive)
        for path in args.data:
            questions = setting.questions(path, args.questions, bench.engine)
            bench.ingest(path, questions, setting, [])
            out = RecordFile(args.out, f"{rounds_name()} {setting.digest(path.stem, bench.engine)}", (0, 1))
            known = out.read()
            for number, question in enumerate(questions, 1):
                if missing := {name: way for name, way in ways.items() if (question.id, name) not in known}:
                    out.append(question.id, ask(bench, missing, question, setting))
                    print(f"{path.stem}: {number} of {len(questions)}", flush=True)
            known = out.read()
            everything += [{name: known[q.id, name] for name in ways} for q in questions]
    rows = summarise(everything)
    result = {"environment": environment(), "frame": args.frame, "passages": args.passages, "part": args.part,
              "dtype": bench.engine.dtype, "corpus": args.corpus,
              "data": [path.stem for path in args.data], "rows": rows}  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(f"# Adaptive recomputation\n\n{markdown(rows)}", encoding="utf-8")
    print(markdown(rows))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped. The records so far are kept: the same command goes on from here.")
