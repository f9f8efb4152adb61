"""Measure, compare, predict.

    PYTHONPATH=benchmarks python -m simulation ingest --data ../shared/data/squad10.jsonl --kv-dir kv
    PYTHONPATH=benchmarks python -m simulation measure --data ../shared/data/squad10.jsonl --kv-dir kv
    PYTHONPATH=benchmarks python -m simulation compare
    PYTHONPATH=benchmarks python -m simulation predict

``measure`` is one run of the real engine on this machine: single passes and steps, and two loads of requests in turns
with them. ``compare`` fits the costs to passes and steps, simulates the loads, and writes what was measured and what
was simulated beside each other into ``benchmarks/results/simulation_cpu.json``. ``predict`` simulates machines that are
not here, with assumed figures, into ``benchmarks/results/simulation_assumed.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from environment import environment
from rich.console import Console

from fused_kv_llm import FusedKVEngine

from .compare import compare, comparison_table, learnt
from .costs import fitted
from .measured import Prompts, measured_run
from .predict import SECTIONS, predict, prediction_tables

RESULTS = Path(__file__).parents[1] / "results"
QUESTIONS = 40


def _engine(kv_dir: Path) -> FusedKVEngine:
    return FusedKVEngine("smollm2-135m", kv_dir=kv_dir, memory_bytes=4 * 2**30, prefix_cache_bytes=0)


def _measure(args: argparse.Namespace, record: dict[str, Any]) -> None:
    with _engine(args.kv_dir) as engine:
        prompts = Prompts(args.data, engine, QUESTIONS)
        if args.what == "ingest":
            print(engine.build_kv_cache(prompts.passages, preprocess="wait").summary())
            return
        record |= {"environment": environment(), **measured_run(engine, prompts)}
    record["costs"] = fitted(record["calibration"]).to_dict()


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ingest", "measure", "compare", "predict"))
    parser.add_argument("--data", type=Path, help="the question file")
    parser.add_argument("--kv-dir", type=Path, help="a store with the file's passages, which `ingest` makes")
    parser.add_argument("--requests", type=int, default=800, help="of each predicted trace")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what is predicted")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    name = "simulation_assumed.json" if args.what == "predict" else "simulation_cpu.json"
    path = args.out or RESULTS / name
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if args.what == "predict":
        record |= {"note": "Simulated, from assumed hardware. Nothing here was measured."}
        record |= predict(args.requests, args.sections)
        for table in prediction_tables(record):
            Console().print(table)
    elif args.what == "compare":
        record["costs"] = learnt(record, fitted(record["calibration"])).to_dict()
        record["compared"] = compare(record)
        Console().print(comparison_table(record["compared"]))
    else:
        _measure(args, record)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
