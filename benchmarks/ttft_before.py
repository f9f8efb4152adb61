"""Time to first token of this version and of an earlier one, in turns, so that a slow moment slows both.

    git worktree add ../before ef29390^    # a version whose context shifts come from contexts of stored KV
    python benchmarks/ttft_before.py --before ../before --kv-dir build/ttft_before

Two processes keep one version each, with the embedded handbook ingested under that version's defaults. Prompts of
growing length are asked at one ratio, each version beginning in every other round, without the cache of answered
prompts, which would answer the same prompt from its own KV. The ratio of the medians is what a user would notice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment import environment
from rich.progress import track

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import handbook_passages, handbook_questions

FRAME = "Answer the question from the context.\n\nContext:\n{}\n\nQuestion: {}\nAnswer briefly."
PASSAGES = (8, 8, 16, 16, 24, 24)
HERE = Path(__file__).parent
RATIO = 0.15


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier version")
    parser.add_argument(
        "--kv-dir", type=Path, required=True, help="keeps both versions' KV, so a rerun ingests nothing"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ttft_before_cpu.json")
    return parser.parse_args()


def prompts_and_passages() -> tuple[list[str], list[str]]:
    """Return the prompts that are asked and the passages that are ingested."""
    passages = handbook_passages()
    questions = [question["question"] for question in handbook_questions()]
    prompts = []
    for number, count in enumerate(PASSAGES):
        context = "\n\n".join(passages[5 * number : 5 * number + count])
        prompts.append(FRAME.format(context, questions[number]))
    return prompts, passages


def work(args: argparse.Namespace) -> None:
    """Ingest, warm up, then answer every number on standard input with the report of that prompt."""
    spec = json.loads(sys.stdin.readline())
    with FusedKVEngine(kv_dir=args.kv_dir, dtype=args.dtype, prefix_cache_bytes=0) as engine:
        engine.build_kv_cache(spec["passages"], progress=False, preprocess="wait")

        def ask(prompt: str) -> dict[str, Any]:
            report = engine.generate(prompt, max_tokens=1, recompute_ratio=RATIO).report
            return {"ttft_s": report.ttft_s, "computed": report.computed_tokens}

        for prompt in spec["prompts"]:
            ask(prompt)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(ask(spec["prompts"][int(line)])), flush=True)


class Version:
    """One version in a process of its own."""

    def __init__(self, root: Path, kv_dir: Path, args: argparse.Namespace, spec: str) -> None:
        command = [sys.executable, __file__, "--worker", "--before", str(root)]
        command += ["--kv-dir", str(kv_dir), "--dtype", args.dtype]
        self._root = root
        paths = os.pathsep.join(str(root / part) for part in ("src", "kernels", "integrations"))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        )
        self._said(spec)

    def ask(self, prompt: int) -> dict[str, Any]:
        """Return what the first token of a prompt took."""
        answer: dict[str, Any] = json.loads(self._said(str(prompt)))
        return answer

    def _said(self, line: str) -> str:
        self._process.stdin.write(f"{line}\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        answer = self._process.stdout.readline().strip()  # type: ignore[union-attr]
        if not answer:
            sys.exit(f"the version in {self._root} has ended: see what it printed above")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def summary(asked: dict[str, list[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return a row for each prompt: seconds of both versions, and the later over the earlier."""
    rows = []
    for before, now in zip(asked["before"], asked["now"], strict=True):
        seconds = [[answer["ttft_s"] for answer in answers] for answers in (before, now)]
        medians = [statistics.median(times) for times in seconds]
        rows.append({
            "computed_before": before[0]["computed"], "computed_now": now[0]["computed"], "before_s": medians[0],
            "now_s": medians[1], "now_over_before": medians[1] / medians[0], "all_before_s": seconds[0],
            "all_now_s": seconds[1],
        })  # fmt: skip
    return rows


def main() -> None:
    """Run the benchmark."""
    args = parse()
    if args.worker:
        work(args)
        return
    prompts, passages = prompts_and_passages()
    spec = json.dumps({"prompts": prompts, "passages": passages})
    roots = {"before": args.before.resolve(), "now": HERE.parent.resolve()}
    versions = {name: Version(root, args.kv_dir / name, args, spec) for name, root in roots.items()}
    asked: dict[str, list[list[dict[str, Any]]]] = {name: [[] for _ in prompts] for name in versions}
    for number in track(range(args.rounds), description="rounds"):
        order = list(versions.items())[:: -1 if number % 2 else 1]
        for prompt in range(len(prompts)):
            for name, version in order:
                asked[name][prompt].append(version.ask(prompt))
    for version in versions.values():
        version.close()
    rows = summary(asked)
    mean = statistics.geometric_mean(row["now_over_before"] for row in rows)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=args.before, capture_output=True, text=True, check=True)
    head = {
        "before": commit.stdout.strip(),
        "environment": environment(),
        "dtype": args.dtype,
        "recompute_ratio": RATIO,
        "now_over_before": mean,
    }
    args.out.write_text(json.dumps({**head, "prompts": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print({name: value for name, value in row.items() if not name.startswith("all")})
    print(f"geometric mean: {mean:.3f}")


if __name__ == "__main__":
    main()
