"""Quality of every method, side by side: fidelity, answers, and time to first token.

    python benchmarks/quality.py --data ../shared/data/squad10.jsonl --questions 100 \
        --selectors all_layers fusionrag --preprocessing none --ratios 0.15

Every data file has one question a line: ``id, question, answers, passages [{id, title, text}], gold_passage_ids``.
For every question a full prefill is computed once; every method answers the same prompt, and the distribution over
the next token at every position of the gold answer is compared with full prefill's (KL, top-1 agreement).
The gold answer's probability is the geometric mean over its tokens. ``--answers 24`` also generates and scores F1, EM,
containment, ROUGE-L against full prefill's answer, and the share of an answer's words that its passages hold
(support); ``--recall`` also selects at 10%.

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
from pathlib import Path
from typing import Any

from environment import environment
from evaluation.measure import Settings, measure
from evaluation.methods import FULL, Method, methods_of
from evaluation.picture import draw
from evaluation.questions import FRAMES, Question, read_corpus, read_questions
from evaluation.records import RecordFile, read_records, settings_digest
from evaluation.summary import markdown_table, summarise
from filelock import FileLock
from gemma import model_source
from rich.progress import track

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_PREPROCESSING, DEFAULT_SELECTOR
from fused_kv_llm.model import LoadedModel, load_model
from fused_kv_llm.offline import SentenceEmbedder
from fused_kv_llm.offline.neighbours import find_neighbours


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="question files")
    parser.add_argument("--questions", type=int, default=60, help="first questions of every file; 0 takes all")
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--selectors", nargs="+", default=[DEFAULT_SELECTOR])
    parser.add_argument("--preprocessing", nargs="+", default=[DEFAULT_PREPROCESSING])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.15])
    parser.add_argument("--corpus", choices=("all", "used"), default="all", help="passages neighbours are drawn from")
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
    return parser.parse_args()


def open_engines(
    stack: ExitStack, loaded: LoadedModel, kv_dir: Path, preprocessings: list[str]
) -> dict[str, FusedKVEngine]:
    """Return one engine a preprocessing, all with the same model."""
    engines = {}
    for name in dict.fromkeys(["none", *preprocessings]):
        engines[name] = stack.enter_context(
            FusedKVEngine(loaded, kv_dir=kv_dir, store_misses=False, preprocessing=name)
        )
    return engines


def neighbours_in(corpus: list[str], used: list[str], count: int, kv_dir: Path) -> dict[str, tuple[str, ...]]:
    """Return the most similar passages of a set's corpus, as an ingestion of the whole of it would find them."""
    texts = list(dict.fromkeys(text.strip() for text in used))
    return find_neighbours(texts, corpus, count, SentenceEmbedder(), kv_dir / "vectors.sqlite")


def ingest(
    engines: dict[str, FusedKVEngine], kv_dir: Path, path: Path, questions: list[Question], args: argparse.Namespace
) -> None:
    """Store the KV of a set's passages; processes that share the questions take turns."""
    used = list(dict.fromkeys(text for question in questions for text in question.passages))
    corpus = list(dict.fromkeys(text.strip() for text in (read_corpus(path) if args.corpus == "all" else used)))
    with FileLock(kv_dir / "quality.lock"):
        for name, engine in engines.items():
            # Neighbours come from the whole corpus of the set; KV is made of the passages that stand in prompts.
            near = None if name == "none" else neighbours_in(corpus, used, engine.config.num_neighbours, kv_dir)
            print(f"{path.stem}, {name}: {engine.build_kv_cache(used, neighbours=near, preprocess='wait').summary()}")
            for selector in args.selectors:
                engine.build_anchors(used, selector=selector)


def run_set(
    engines: dict[str, FusedKVEngine], path: Path, methods: list[Method], args: argparse.Namespace, kv_dir: Path
) -> dict[str, Any]:
    """Measure what is missing of one data set and return its result."""
    questions = read_questions(path, args.questions, args.passages, args.order)
    engine = engines["none"]
    digest = settings_digest(
        data=path.stem, model=engine.model_fingerprint, dtype=engine.dtype, frame=args.frame,
        passages=args.passages, corpus=args.corpus, answers=args.answers, recall=args.recall, order=args.order,
    )  # fmt: skip
    shard, shards = (int(part) for part in args.shard.split("/"))
    records = read_records(args.out, digest)
    wanted = [FULL, *methods]
    missing = {q.id: [m for m in wanted if (q.id, m.key) not in records] for q in questions[shard::shards]}
    if any(missing.values()):
        ingest(engines, kv_dir, path, questions, args)
    settings = Settings(args.frame, args.answers, args.recall)
    out = RecordFile(args.out, digest, (shard, shards))
    for question in track([q for q in questions if missing.get(q.id)], description=path.stem):
        todo = [method for method in missing[question.id] if method != FULL]
        measured = measure(engines, question, todo, settings)
        out.append(question.id, {method.key: record for method, record in measured.items()})
    records = read_records(args.out, digest)
    keys = {method.key for method in wanted}
    chosen = {pair: record for pair, record in records.items() if pair[1] in keys}
    return {"data": path.stem, "rows": summarise(chosen, [q.id for q in questions])}


def write_results(results: list[dict[str, Any]], engine: FusedKVEngine, args: argparse.Namespace) -> None:
    """Write JSON, markdown and PNG beside each other, and print the tables."""
    head = {
        "environment": environment(), "model": args.model, "dtype": engine.dtype, "device": engine.device,
        "frame": args.frame, "passages": args.passages, "corpus": args.corpus,
    }  # fmt: skip
    args.out.write_text(json.dumps({**head, "results": results}, indent=1) + "\n", encoding="utf-8")
    about = f"{args.model}, {engine.dtype}, {args.passages} passages, prompt frame `{args.frame}`"
    parts = [f"# Quality\n\n{about}. `{head['environment']['command']}`\n"]
    for result in results:
        count = result["rows"][0]["questions"] if result["rows"] else 0
        parts.append(f"## {result['data']}, {count} questions\n\n{markdown_table(result['rows'])}\n")
    text = "\n".join(parts)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    if all(result["rows"] for result in results):
        draw(results, args.out.with_suffix(".png"))


def main() -> None:
    """Run the benchmark."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-quality-"))
    kv_dir.mkdir(parents=True, exist_ok=True)
    methods = methods_of(args.selectors, args.preprocessing, args.ratios)
    with ExitStack() as stack:
        loaded = load_model(model_source(args.model), dtype=args.dtype, device=args.device)
        engines = open_engines(stack, loaded, kv_dir, args.preprocessing)
        results = [run_set(engines, path, methods, args, kv_dir) for path in args.data]
        write_results(results, engines["none"], args)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped. The records so far are kept: the same command goes on from here.")
