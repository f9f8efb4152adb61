"""The fair table: every rule with deviation transfer and without, under every preprocessing, over a grid of settings.

    python benchmarks/fair.py --data ../shared/data --minutes 120

The grid (``evaluation/grid.py``) has two models, three sets and RULER's tasks, two wordings, five and ten chunks,
chunks of one passage and of 600 tokens, four ratios. It is sampled: first a few questions of everything, then more.
The passages of other questions are ingested with those that are asked, so that a chunk is preprocessed with others
than those of its prompts. Records are appended question by question and the summary is written after every cell, so
that the run can be stopped at any time; the same command goes on. Chunk orders are shuffled, and the questions are the
held-back third (``--part``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import get_args

from environment import environment
from evaluation.fair_summary import CellLog, markdown, summary
from evaluation.grid import MODELS, RATIOS, Cell, cells
from evaluation.methods import Method, methods_of
from evaluation.questions import PARTS, Question
from evaluation.records import RecordFile
from evaluation.ruler import TASKS, make_ruler
from evaluation.rules import all_rules, base_name
from evaluation.run import Bench, missing, open_bench
from gemma import model_source

from fused_kv_llm.config import EngineConfig
from fused_kv_llm.errors import FusedKVError
from fused_kv_llm.model import load_model

_RULER_QUESTIONS = 10
_OTHER_QUESTIONS = 20
"""Questions of a set whose passages are ingested with those of the questions that are asked."""


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the sets")
    parser.add_argument("--minutes", type=float, default=60.0, help="no question is begun after them")
    parser.add_argument("--part", choices=PARTS, default="held")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ratios", nargs="+", type=float, choices=RATIOS, default=list(RATIOS))
    # The same on every machine, so that a run on another one goes on with the same table.
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--rules", nargs="+", default=all_rules(), help="all of them without it")
    parser.add_argument("--only", nargs="+", help="cells whose name has one of these, such as ruler or short")
    parser.add_argument("--cells", type=int, default=None, help="only the first so many")
    parser.add_argument("--questions", type=int, default=None, help="at most so many of a cell")
    parser.add_argument("--kv-dir", type=Path, default=Path("build/fair_kv"), help="kept between runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fair_cpu.json")
    return parser.parse_args()


class Run:
    """A run over the grid with one model at a time.

    Parameters
    ----------
    args : argparse.Namespace
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._preprocessings = list(get_args(EngineConfig.model_fields["preprocessing"].annotation))
        self._log = CellLog(args.out)
        self._stack = ExitStack()
        self._bench: tuple[str, Bench] | None = None
        self.until_s = time.perf_counter() + 60 * args.minutes

    def measure(self, cell: Cell) -> bool:
        """Measure what is missing of a cell; return whether anything was."""
        bench, path = self._bench_of(cell.model), self._path(cell)
        questions = self._sample(cell, path, bench)
        methods = self._methods(cell.ratio)
        digest = cell.setting.digest(cell.data, bench.engine)
        out = RecordFile(self._args.out, digest, (0, 1))
        todo = missing(out, questions, methods)
        if not todo:
            return False
        self._log.note_settings(cell, digest, self._args.dtype)
        self._ingest(cell, bench, path, [question for question, _ in todo])
        bench.measure(questions, methods, cell.setting, out, self.until_s)
        return True

    def close(self) -> None:
        """Close the engines."""
        self._stack.close()

    def failed(self, cell: Cell, error: Exception) -> None:
        """Note that a cell could not be measured; the grid goes on."""
        print(f"{cell.name}: {error}", file=sys.stderr)
        self._log.append({"kind": "failure", "cell": cell.name, "ratio": cell.ratio, "error": str(error)})

    def _methods(self, ratio: float) -> list[Method]:
        return methods_of(self._args.rules, self._preprocessings, [ratio])

    def _sample(self, cell: Cell, path: Path, bench: Bench) -> list[Question]:
        """Return questions drawn by a hash: a set's first ones would all be of one article."""
        questions = cell.setting.questions(path, 0, bench.engine)
        questions.sort(key=lambda question: hashlib.sha256(f"fair {question.id}".encode()).hexdigest())
        return questions[: min(cell.questions, self._args.questions or cell.questions)]

    def _ingest(self, cell: Cell, bench: Bench, path: Path, questions: list[Question]) -> None:
        selectors = list(dict.fromkeys(base_name(rule) for rule in self._args.rules))
        others = replace(cell.setting, part="all", corpus="used")
        corpus = [*questions, *others.questions(path, _OTHER_QUESTIONS, bench.engine)]
        for name, report in bench.ingest(path, corpus, others, selectors).items():
            if chunks := report.chunks_new or report.chunks_preprocessed:
                seconds = report.seconds if name == "none" else report.seconds + report.preprocessing_seconds
                self._log.append({"kind": "ingestion", "model": cell.model, "dtype": bench.engine.dtype,
                                  "preprocessing": name, "chunks": chunks, "seconds": seconds,
                                  "bytes": report.bytes_written})  # fmt: skip

    def _bench_of(self, model: str) -> Bench:
        if self._bench is None or self._bench[0] != model:
            self._stack.close()
            loaded = load_model(model_source(model), dtype=self._args.dtype)
            bench = open_bench(self._stack, loaded, self._args.kv_dir, self._preprocessings)
            self._bench = model, bench
        return self._bench[1]

    def _path(self, cell: Cell) -> Path:
        if not cell.data.startswith("ruler_"):
            return self._args.data / f"{cell.data}.jsonl"
        path: Path = self._args.kv_dir / f"{cell.data}.jsonl"
        if not path.exists():
            task, words = cell.data.removeprefix("ruler_").rsplit("_", 1)
            known = next(one for one in TASKS if one == task)
            lines = make_ruler(known, _RULER_QUESTIONS, words=int(words))
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path


def write(args: argparse.Namespace, grid: list[Cell]) -> None:
    """Write JSON and markdown beside the records."""
    result = {"environment": environment(), "part": args.part, **summary(args.out, grid, args.rules)}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(markdown(result), encoding="utf-8")


def chosen_cells(args: argparse.Namespace, grid: list[Cell]) -> list[Cell]:
    """Return the cells that the command line asks for, in the grid's order."""
    found = [cell for cell in grid if cell.model in args.models and cell.ratio in args.ratios]
    named = found if args.only is None else [cell for cell in found if any(text in cell.name for text in args.only)]
    if not named:
        raise SystemExit(f"--only {' '.join(args.only)}: no cell has such a name; one is called {found[0].name!r}")
    return named[: args.cells]


def main() -> None:
    """Run the benchmark."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    grid = list(cells(args.part))
    chosen = chosen_cells(args, grid)
    run = Run(args)
    try:
        for number, cell in enumerate(chosen, 1):
            if time.perf_counter() > run.until_s:
                print(f"The time is over before cell {number} of {len(chosen)}: the same command goes on from here.")
                break
            try:
                measured = run.measure(cell)
            except FusedKVError as error:
                run.failed(cell, error)
                continue
            if measured:
                write(args, grid)
                print(f"{number} of {len(chosen)}: {cell.name}, ratio {cell.ratio:g}")
    finally:
        run.close()
    write(args, grid)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped. The records so far are kept: the same command goes on from here.")
