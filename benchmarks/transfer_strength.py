"""How much of a chunk's mean deviation the default transfers, where KV has no context shifts: KL by strength.

    python benchmarks/transfer_strength.py --data ../shared/data/musique_train100.jsonl --part dev

Chunks are stored without preprocessing. Each question is asked with full prefill, with full reuse, and at one ratio
with every strength. *Recovered* is the share of the KL divergence of full reuse, on the gold answer, that a strength
wins back, *typical* the same of geometric means.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from environment import environment
from evaluation.measure import run
from evaluation.metrics import mean_kl
from evaluation.questions import FRAMES, PARTS, Question
from evaluation.setting import Setting
from evaluation.summary import bootstrap, geometric_mean_ratio
from gemma import model_source
from rich.progress import track

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import load_model
from fused_kv_llm.selectors import SinkAttention

_REUSE = "full reuse"


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="question files")
    parser.add_argument("--questions", type=int, default=40, help="of every file")
    parser.add_argument("--part", choices=PARTS, default="dev")
    parser.add_argument("--passages", type=int, default=10)
    parser.add_argument("--frames", choices=FRAMES, nargs="+", default=["plain", "short"])
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--out", type=Path, default=None, help="where the record is written; none by default")
    return parser.parse_args()


def ask(engine: FusedKVEngine, question: Question, setting: Setting, args: argparse.Namespace) -> dict[str, float]:
    """Return the KL of every way to answer a question."""
    full = run(engine, question, setting, recompute_ratio=1.0)
    found = {_REUSE: mean_kl(full.log_probs, run(engine, question, setting, recompute_ratio=0.0).log_probs)}
    for strength in args.strengths:
        selector = replace(SinkAttention(), transfer=strength)
        got = run(engine, question, setting, recompute_ratio=args.ratio, selector=selector)
        found[f"{strength:g}"] = mean_kl(full.log_probs, got.log_probs)
    return found


def rows_of(asked: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return a row for every strength."""
    kl = {way: [one[way] for one in asked] for way in asked[0]}
    return [
        {"strength": float(way), "recovered": 1 - sum(values) / sum(kl[_REUSE]),
         "recovered_95": bootstrap(values, kl[_REUSE], "recovered"),
         "recovered_typical": 1 - geometric_mean_ratio(values, kl[_REUSE])}
        for way, values in kl.items() if way != _REUSE
    ]  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    args = parse()
    loaded = load_model(model_source(args.model), dtype=args.dtype)
    tables = []
    with (
        tempfile.TemporaryDirectory(prefix="fused-kv-transfer-") as folder,
        FusedKVEngine(loaded, kv_dir=folder, preprocessing="none", store_misses=False) as engine,
    ):
        for path in args.data:
            for frame in args.frames:
                setting = Setting(frame=frame, passages=args.passages, part=args.part)
                questions = setting.questions(path, args.questions, engine)
                engine.build_kv_cache(list({text for one in questions for text in one.passages}), progress=False)
                asked = [ask(engine, one, setting, args) for one in track(questions, f"{path.stem}, {frame}")]
                tables.append({"data": path.stem, "frame": frame, "questions": len(asked), "rows": rows_of(asked),
                               "kl": {one.id: kl for one, kl in zip(questions, asked, strict=True)}})  # fmt: skip
                for row in tables[-1]["rows"]:
                    print(path.stem, frame, {name: round(row[name], 3) for name in row if name != "recovered_95"})
        dtype = engine.dtype
    head = {"environment": environment(), "model": args.model, "dtype": dtype, "part": args.part,
            "passages": args.passages, "ratio": args.ratio}  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps({**head, "results": tables}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
