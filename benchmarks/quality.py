"""Quality of every method, side by side: fidelity, answers, and time to first token.

    python benchmarks/quality.py --data ../shared/data/squad10.jsonl --questions 100 \
        --selectors all_layers fusionrag --preprocessing none --ratios 0.15

Every data file has one question a line: ``id, question, answers, passages [{id, title, text}], gold_passage_ids``.
For every question a full prefill is computed once; every method answers the same prompt, and the distribution over
the next token at every position of the gold answer is compared with full prefill's (KL, top-1 agreement).
The gold answer's probability is the geometric mean over its tokens. ``--answers 24`` also generates and scores F1, EM,
containment, ROUGE-L against full prefill's answer, and the share of an answer's words that its passages hold
(support); ``--recall`` also selects at 10%.

``cacheblend+transfer`` is a rule with the default's deviation transfer, ``sink_attention-transfer`` the default without
it.

Records are appended question by question beside the result (``*.records.jsonl``): the same command goes on where it
was stopped and computes only what is missing. Remove the records after changing a selector. ``--shard 0/2`` and
``--shard 1/2`` share the questions between two processes; run once more without it for the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from environment import environment
from evaluation.methods import FULL, Method, methods_of
from evaluation.picture import draw
from evaluation.pooling import pool
from evaluation.questions import FRAMES, PARTS
from evaluation.records import RecordFile, Records
from evaluation.run import Bench, missing, open_bench
from evaluation.setting import CORPORA, Setting
from evaluation.summary import markdown_table, summarise
from gemma import model_source

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_PREPROCESSING, DEFAULT_PREPROCESSING_PROMPTS, DEFAULT_SELECTOR
from fused_kv_llm.model import load_model

_MOST_LINES = 30
"""Of a picture: more cannot be told apart."""


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="question files")
    parser.add_argument("--questions", type=int, default=60, help="first questions of every file; 0 takes all")
    parser.add_argument("--passages", type=int, default=5, help="chunks of a prompt")
    parser.add_argument("--selectors", nargs="+", default=[DEFAULT_SELECTOR])
    parser.add_argument("--preprocessing", nargs="+", default=[DEFAULT_PREPROCESSING])
    parser.add_argument("--preprocessing-prompts", type=int, choices=(1, 2, 4), default=DEFAULT_PREPROCESSING_PROMPTS,
                        help="of each chunk; each needs an --out of its own")  # fmt: skip
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.15])
    parser.add_argument("--corpus", choices=CORPORA, default="all",
                        help="all passages; those of prompts; or those, preprocessed as in all (asked)")  # fmt: skip
    parser.add_argument("--chunk-tokens", type=int, default=0, help="join an article's passages to about so many")
    parser.add_argument("--part", choices=PARTS, default="all", help="dev: without the held-back third of questions")
    parser.add_argument("--frame", choices=FRAMES, default="plain", help="wording of the prompt around the passages")
    parser.add_argument("--order", choices=("shuffled", "file"), default="shuffled", help="of a prompt's passages")
    parser.add_argument("--answers", type=int, default=0, metavar="TOKENS", help="longest answer to generate; 0: none")
    parser.add_argument("--recall", action="store_true", help="recall of gold-answer tokens at a 10%% selection")
    parser.add_argument("--model", default="smollm2-135m", help="what the engine takes, or gemma3-270m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--shard", default="0/1", help="i/n: only every n-th question, from the i-th")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "quality_cpu.json")
    args = parser.parse_args()
    if len({path.stem for path in args.data}) < len(args.data):
        parser.error("--data: a set goes by its file's name in the tables, so each needs one of its own")
    return args


def setting_of(args: argparse.Namespace) -> Setting:
    """Return how the questions are asked."""
    return Setting(
        frame=args.frame, passages=args.passages, order=args.order, chunk_tokens=args.chunk_tokens, part=args.part,
        corpus=args.corpus, answer_tokens=args.answers, recall=args.recall,
    )  # fmt: skip


def run_set(bench: Bench, path: Path, methods: list[Method], args: argparse.Namespace) -> Records:
    """Measure what is missing of one data set and return the records of its questions."""
    setting = setting_of(args)
    questions = setting.questions(path, args.questions, bench.engine)
    shard, shards = (int(part) for part in args.shard.split("/"))
    out = RecordFile(args.out, setting.digest(path.stem, bench.engine), (shard, shards))
    if missing(out, mine := questions[shard::shards], methods):
        bench.ingest(path, questions, setting, args.selectors)
        bench.measure(mine, methods, setting, out)
    kept, keys = out.read(), [method.key for method in (FULL, *methods)]
    return {pair: kept[pair] for pair in product((q.id for q in questions), keys) if pair in kept}


def write_results(records: dict[str, Records], engine: FusedKVEngine, args: argparse.Namespace) -> None:
    """Write JSON, markdown and PNG beside each other, and print the tables: of each set, and of several together."""
    results = [{"data": name, "rows": _rows(found)} for name, found in records.items()]
    pooled = [{"data": "all sets", "rows": _rows(pool(records.values()))}] if len(records) > 1 else []
    head = {
        "environment": environment(), "model": args.model, "dtype": engine.dtype, "device": engine.device,
        **asdict(setting_of(args)),
    }  # fmt: skip
    args.out.write_text(json.dumps({**head, "results": results, "pooled": pooled}, indent=1) + "\n", encoding="utf-8")
    about = f"{args.model}, {engine.dtype}, {args.passages} passages, prompt frame `{args.frame}`"
    parts = [f"# Quality\n\n{about}. `{head['environment']['command']}`\n"]
    for result in [*results, *pooled]:
        count = result["rows"][0]["questions"] if result["rows"] else 0
        parts.append(f"## {result['data']}, {count} questions\n\n{markdown_table(result['rows'])}\n")
    text = "\n".join(parts)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    lines = {(row["selector"], row["preprocessing"]) for result in results for row in result["rows"]}
    if all(result["rows"] for result in results) and len(lines) <= _MOST_LINES:
        draw(results, args.out.with_suffix(".png"))


def _rows(records: Records) -> list[dict[str, Any]]:
    return summarise(records, list(dict.fromkeys(question for question, _ in records)))


def main() -> None:
    """Run the benchmark."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-quality-"))
    methods = methods_of(args.selectors, args.preprocessing, args.ratios)
    with ExitStack() as stack:
        loaded = load_model(model_source(args.model), dtype=args.dtype, device=args.device)
        bench = open_bench(stack, loaded, kv_dir, args.preprocessing, preprocessing_prompts=args.preprocessing_prompts)
        records = {path.stem: run_set(bench, path, methods, args) for path in args.data}
        write_results(records, bench.engine, args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped. The records so far are kept: the same command goes on from here.")
