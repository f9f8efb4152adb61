"""Fidelity: KL divergence from full prefill on the teacher-forced gold answer, by selector and ratio.

    python benchmarks/fidelity.py --data ../shared/data/squad10.jsonl --questions 60

The data file has one question a line: ``id, question, answers, passages [{id, title, text}]``. For every question the
model answers from its first passages; the distribution over the next token at every position of the gold answer is
compared with that of a full prefill of the same ids.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from environment import environment
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import kl_div, log_softmax

from fused_kv_llm import FusedKVEngine

SELECTORS = ["random", "boundary", "fusionrag", "middle_layers", "all_layers", "prophetkv"]
FRAMES = {
    "plain": "Context:\n{}\n\nQuestion: {}\nAnswer:",
    "short": "Answer the question with a short phrase from these passages.\n\n{}\n\nQuestion: {}\nShort answer:",
    "instruct": "Answer the question from the context.\n\nContext:\n{}\n\nQuestion: {}\nAnswer with a few words.",
}


def read_questions(path: Path, count: int, num_passages: int) -> list[dict[str, Any]]:
    """Return questions with `num_passages` passages each, a gold one among them."""
    questions = []
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        record = json.loads(line)
        gold = [p["text"] for p in record["passages"] if p["id"] in record["gold_passage_ids"]]
        others = [p["text"] for p in record["passages"] if p["id"] not in record["gold_passage_ids"]]
        texts = [*gold, *others][:num_passages]
        random.Random(record["id"]).shuffle(texts)
        questions.append({"question": record["question"], "answer": record["answers"][0], "passages": texts})
    return questions


def answer_log_probs(engine: FusedKVEngine, prompt: str, answer_ids: list[int], **options: Any) -> torch.Tensor:
    """Return log-probabilities ``[len(answer), vocabulary]`` before each token of the answer."""
    fused, _ = engine.prefill(prompt, max_tokens=len(answer_ids) + 1, **options)
    logits = fused.logits[None]
    if len(answer_ids) > 1:
        logits = torch.cat((logits, fused.append(engine.loaded, answer_ids[:-1])))
    fused.cache.release()
    return log_softmax(logits, dim=-1)


def bootstrap(values: list[float], baseline: list[float], rounds: int = 2000) -> tuple[float, float]:
    """Return the 95% interval of the share of `baseline`'s mean that `values` recovers, over questions."""
    generator = random.Random(0)
    shares = []
    for _ in range(rounds):
        drawn = generator.choices(range(len(values)), k=len(values))
        shares.append(1 - sum(values[i] for i in drawn) / sum(baseline[i] for i in drawn))
    shares.sort()
    return shares[int(0.025 * rounds)], shares[int(0.975 * rounds)]


Scores = dict[tuple[str, float], list[float]]


def measure(engine: FusedKVEngine, questions: list[dict[str, Any]], args: argparse.Namespace) -> tuple[Scores, Scores]:
    """Return the KL divergence and the top-1 agreement of every question, by selector and ratio."""
    methods = [("full_reuse", 0.0)] + [(name, ratio) for ratio in args.ratios for name in args.selectors]
    kl: Scores = {method: [] for method in methods}
    agree: Scores = {method: [] for method in methods}
    for item in track(questions, description="Questions"):
        prompt = FRAMES[args.frame].format("\n\n".join(item["passages"]), item["question"])
        answer = engine.token_ids(item["answer"])
        full = answer_log_probs(engine, prompt, answer, recompute_ratio=1.0)
        for name, ratio in methods:
            got = answer_log_probs(engine, prompt, answer, recompute_ratio=ratio, selector=name)
            kl[name, ratio].append(float(kl_div(got, full, log_target=True, reduction="none").sum(-1).mean()))
            agree[name, ratio].append(float((got.argmax(-1) == full.argmax(-1)).float().mean()))
    return kl, agree


def summarise(kl: Scores, agree: Scores) -> list[dict[str, Any]]:
    """Return one row a selector and ratio: means, and the share of full reuse's KL that is recovered."""
    baseline = kl["full_reuse", 0.0]
    return [
        {
            "selector": name,
            "ratio": ratio,
            "kl": statistics.fmean(values),
            "recovered": 1 - statistics.fmean(values) / statistics.fmean(baseline),
            "recovered_95": list(bootstrap(values, baseline)),
            "top1_agreement": statistics.fmean(agree[name, ratio]),
        }
        for (name, ratio), values in kl.items()
    ]


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Print one line a selector and ratio."""
    table = Table(title=title)
    for column in ("selector", "ratio", "KL", "recovered", "95% interval", "top-1 agreement"):
        table.add_column(column, justify="left" if column == "selector" else "right")
    for row in rows:
        low, high = row["recovered_95"]
        shares = (f"{row['recovered']:.1%}", f"{low:.1%} to {high:.1%}", f"{row['top1_agreement']:.1%}")
        table.add_row(row["selector"], f"{row['ratio']:g}", f"{row['kl']:.4f}", *shares)
    Console(width=110).print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.15])
    parser.add_argument("--selectors", nargs="+", default=SELECTORS)
    parser.add_argument("--frame", choices=FRAMES, default="plain", help="wording of the prompt around the passages")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--kv-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fidelity_cpu.json")
    args = parser.parse_args()
    questions = read_questions(args.data, args.questions, args.passages)
    kv_dir = args.kv_dir or tempfile.mkdtemp(prefix="fused-kv-fidelity-")
    with FusedKVEngine("smollm2-135m", kv_dir=kv_dir, dtype=args.dtype) as engine:
        print(engine.build_kv_cache([text for q in questions for text in q["passages"]]).summary())
        rows = summarise(*measure(engine, questions, args))
    title = f"{len(questions)} questions of {args.data.name}, {args.passages} passages, frame {args.frame}"
    print_table(rows, f"{title}, {engine.dtype}")
    result = {
        "environment": environment(),
        "data": args.data.name,
        "dtype": engine.dtype,
        "frame": args.frame,
        "passages": args.passages,
        "questions": len(questions),
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
