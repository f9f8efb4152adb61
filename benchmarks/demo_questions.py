"""The demo's questions, asked as the demo asks them: do fused answers hold the fact and agree with plain transformers'?

    python benchmarks/demo_questions.py                          # all 36 questions at the demo's settings
    python benchmarks/demo_questions.py --ratios 0.15 0.3 0.5

The questions are those of ``fused_kv_llm/demo/questions.json``: one about each of the first three passages of every
handbook file, which asks for the first number of the passage. They were written before any answer was seen, and none
was dropped since. An answer *holds the fact* if the number stands in it, and *agrees* if it is plain transformers'
answer word for word after SQuAD's normalisation (case, punctuation and articles left out).
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import TypedDict

from environment import environment
from evaluation.metrics import exact_match

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import (
    DEMO,
    DemoQuestion,
    MiniLM,
    PassageIndex,
    Rag,
    handbook_folder,
    handbook_questions,
    read_passages,
)
from fused_kv_llm.tuning import full_prefill


class Record(TypedDict):
    """A question with the answer of every way; the first way is plain transformers."""

    question: str
    fact: str
    answers: dict[str, str]


def ask(engine: FusedKVEngine, rag: Rag, entry: DemoQuestion, args: argparse.Namespace) -> Record:
    """Answer one question in every way."""
    prompt = rag.prompt(entry["question"]).text
    limits = {"max_tokens": args.max_tokens, "stop": DEMO.stop}
    answers = {"plain transformers": full_prefill(engine, prompt, **limits).text}
    for ratio in args.ratios:
        answers[f"ratio {ratio:g}"] = engine.generate(prompt, recompute_ratio=ratio, **limits).text
    answers = {way: " ".join(answer.split()) for way, answer in answers.items()}
    return {"question": entry["question"], "fact": entry["answer"], "answers": answers}


def holds(answer: str, fact: str) -> bool:
    """Return whether the fact stands in an answer, not as a part of another number: 105 is not in 10.5 or 1050."""
    return re.search(rf"(?<![\d.,:]){re.escape(fact)}(?!\d|[.,:]\d)", answer) is not None


def marks(record: Record, way: str) -> tuple[bool, bool]:
    """Return whether an answer holds the fact, and whether it is plain transformers'."""
    answer = record["answers"][way]
    return holds(answer, record["fact"]), bool(exact_match(answer, record["answers"]["plain transformers"]))


def table(records: list[Record]) -> str:
    """Return what was counted as markdown."""
    ways = list(records[0]["answers"])
    right = [record for record in records if marks(record, ways[0])[0]]
    lines = [
        f"{len(records)} questions. Plain transformers' answer holds the fact in {len(right)} of them; the last column",
        "counts those of them in which the answer holds the fact and agrees with plain transformers'.\n",
        "| way | holds the fact | agrees | both, where plain holds the fact |",
        "|---|--:|--:|--:|",
    ]
    for way in ways:
        facts, agreements = zip(*(marks(record, way) for record in records), strict=True)
        both = sum(all(marks(record, way)) for record in right)
        lines.append(f"| {way} | {sum(facts)} | {sum(agreements)} | {both} of {len(right)} |")
    return "\n".join(lines)


def answers(record: Record) -> str:
    """Return one question with its answers; + holds the fact, = agrees."""
    lines = [f"**{record['question']}** {record['fact']}\n"]
    for way, answer in record["answers"].items():
        fact, agrees = marks(record, way)
        lines.append(f"- `{'+' if fact else '-'}{'=' if agrees else ' '}` {way}: {answer}")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=36, help="only the first of them")
    parser.add_argument("--ratios", type=float, nargs="+", default=[DEMO.ratio, 0.3, 0.15, 0.0])
    parser.add_argument("--k", type=int, default=DEMO.passages, help="passages in a prompt")
    parser.add_argument("--max-tokens", type=int, default=DEMO.max_tokens)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "demo_questions_cpu")
    args = parser.parse_args()
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-demo-"))
    passages = read_passages([handbook_folder()])
    records = []
    with FusedKVEngine("smollm2-135m", kv_dir=kv_dir, dtype=args.dtype, prefix_cache_bytes=0) as engine:
        print(engine.build_kv_cache([passage.text for passage in passages], preprocess="wait").summary())
        made = {"model": "smollm2-135m", "dtype": engine.dtype, "kv_dtype": engine.kv_dtype}
        rag = Rag(PassageIndex.update(kv_dir, passages, embedder=MiniLM(), **made), engine, k=args.k, max_tokens=64)
        for entry in handbook_questions()[: args.questions]:
            records.append(ask(engine, rag, entry, args))
            print(answers(records[-1]) + "\n", flush=True)
        about = f"SmolLM2-135M, {engine.dtype}, {args.k} passages, answers up to their first clause"
    stamp = environment()
    head = f"# The demo's questions\n\n{about}. {stamp['cpu']}. `{stamp['command']}`\n"
    legend = "`+` holds the fact, `=` agrees with plain transformers."
    parts = [head, table(records) + "\n", legend + "\n", *(answers(record) + "\n" for record in records)]
    print(table(records))
    args.out.with_suffix(".md").write_text("\n".join(parts), encoding="utf-8")
    result = {"environment": stamp, "about": about, "records": records}
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
