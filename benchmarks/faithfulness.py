"""Faithfulness of answers (FusionRAG section 5.1): do the passages say what a method answers?

    make build/ragas/.done
    python benchmarks/faithfulness.py --data ../shared/data/squad10.jsonl --questions 20 \
        --judge-url https://api.example.org --judge-model NAME

Every method answers the same prompts; then Ragas splits each answer into statements and has a judge say which of them
the passages support. The judge is any server with OpenAI's protocol (OPENAI_API_KEY is its key); without
``--judge-url`` it is this project's own server with the model of ``--judge-model``, which shows that everything works
and is no judge to rely on. Beside it stands the share of an answer's words that its passages hold (support).
Ragas has an environment of its own, since it needs other versions than the project.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from environment import environment
from evaluation.measure import measure
from evaluation.methods import FULL, Method, methods_of
from evaluation.questions import FRAMES, PARTS
from evaluation.run import open_bench
from evaluation.setting import Setting
from gemma import model_source
from server_process import serving

from fused_kv_llm.config import DEFAULT_PREPROCESSING, DEFAULT_SELECTOR
from fused_kv_llm.model import load_model

_ROOT = Path(__file__).resolve().parent.parent
_JUDGE = Path(__file__).with_name("ragas_judge.py")


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="question file")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--part", choices=PARTS, default="held")
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--frame", choices=FRAMES, default="plain")
    parser.add_argument("--answers", type=int, default=48, metavar="TOKENS", help="longest answer")
    parser.add_argument("--selectors", nargs="+", default=[DEFAULT_SELECTOR])
    parser.add_argument("--preprocessing", nargs="+", default=[DEFAULT_PREPROCESSING])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.15])
    parser.add_argument("--model", default="smollm2-135m", help="what answers")
    parser.add_argument("--judge-url", default=None, help="without /v1; the project's own server without it")
    parser.add_argument("--judge-model", default="smollm2-135m")
    parser.add_argument("--judge-mode", choices=("json_schema", "json"), default="json_schema")
    parser.add_argument("--judge-temperature", type=float, default=0.0, help="small judges repeat themselves at 0")
    parser.add_argument("--judge-python", type=Path, default=_ROOT / "build" / "ragas" / "bin" / "python")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "faithfulness_cpu.json")
    return parser.parse_args()


def answer(args: argparse.Namespace, methods: list[Method]) -> list[dict[str, Any]]:
    """Return every method's answer to every question, with the passages and the support."""
    setting = Setting(
        frame=args.frame, passages=args.passages, part=args.part, corpus="used", answer_tokens=args.answers
    )
    lines = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fused-kv-faithfulness-")))
        loaded = load_model(model_source(args.model))
        bench = open_bench(stack, loaded, folder, args.preprocessing)
        questions = setting.questions(args.data, args.questions, bench.engine)
        bench.ingest(args.data, questions, setting, args.selectors)
        for question in questions:
            for method, record in measure(bench.engines, question, methods, setting).items():
                lines.append(
                    {"id": question.id, "method": method.key, "question": question.question,
                     "answer": record["answer"], "contexts": question.passages, "support": record["support"]}
                )  # fmt: skip
    return lines


@contextmanager
def judge_url(args: argparse.Namespace) -> Iterator[str]:
    """Give the judge's address; the project's own server runs as long as it is needed."""
    if args.judge_url is not None:
        yield args.judge_url
        return
    with tempfile.TemporaryDirectory(prefix="fused-kv-judge-") as folder:
        options = ["--model", model_source(args.judge_model), "--model-name", args.judge_model]
        with serving(Path(folder) / "kv", Path(folder) / "log", options) as (_, url):
            yield url


def judge(lines: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Add to each line what the judge says of it, in Ragas' environment."""
    if not args.judge_python.exists():
        raise SystemExit(f"{args.judge_python} is missing: make build/ragas/.done installs Ragas beside the project")
    path = args.out.with_suffix(".answers.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with judge_url(args) as url:
        command = [args.judge_python, _JUDGE, path, "--url", url, "--model", args.judge_model]
        # The project's own path would shadow what Ragas' environment has.
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [*map(str, command), "--mode", args.judge_mode, "--temperature", str(args.judge_temperature)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=clean,
        )
    for line, said in zip(lines, map(json.loads, done.stdout.splitlines()), strict=True):
        line.update(said)


def rows_of(lines: list[dict[str, Any]], methods: list[Method]) -> list[dict[str, Any]]:
    """Return a row a method: mean faithfulness where the judge was understood, and how often it was not."""
    rows = []
    for method in methods:
        mine = [line for line in lines if line["method"] == method.key]
        judged = [line["faithfulness"] for line in mine if line["faithfulness"] is not None]
        rows.append(
            {"method": method.key, "answers": len(mine), "judged": len(judged),
             "faithfulness": sum(judged) / len(judged) if judged else None,
             "support": sum(line["support"] for line in mine) / len(mine)}
        )  # fmt: skip
    return rows


def main() -> None:
    """Run the benchmark."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    methods = methods_of(args.selectors, args.preprocessing, args.ratios)
    lines = answer(args, methods)
    judge(lines, args)
    rows = rows_of(lines, [FULL, *methods])
    kept = [{name: line[name] for name in line if name != "contexts"} for line in lines]
    head = {"environment": environment(), "model": args.model, "judge": args.judge_url or "fused-kv serve",
            "judge_model": args.judge_model, "judge_mode": args.judge_mode,
            "judge_temperature": args.judge_temperature, "data": args.data.stem}  # fmt: skip
    args.out.write_text(json.dumps({**head, "rows": rows, "answers": kept}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped.")
