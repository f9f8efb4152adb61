"""The demo's questions, answered three ways: does the fused answer hold the fact and agree with plain transformers?

    python benchmarks/demo_questions.py                    # as fused-kv demo asks: all 36 questions
    python benchmarks/demo_questions.py --ratio 0.3 --k 20

The questions are those of ``fused_kv_llm/demo/questions.json``: one about each of the first three passages of every
handbook file, which asks for the first number of the passage. They were written before any answer was seen, and none
was dropped since. An answer *holds the fact* if the number stands in it, and *agrees* if it is plain transformers'
answer word for word after SQuAD's normalisation (case, punctuation and articles left out).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from environment import environment
from evaluation.metrics import answer_scores, exact_match
from rich.progress import track

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import (
    DEMO,
    DemoQuestion,
    MiniLM,
    PassageIndex,
    Rag,
    compare,
    handbook_folder,
    handbook_questions,
    read_passages,
)

WAYS = ("plain", "fused", "full reuse")


@dataclass(frozen=True, slots=True)
class Answered:
    """One question with its answers, in the order of `WAYS`."""

    question: str
    fact: str
    answers: tuple[str, ...]

    def holds(self, way: int) -> bool:
        """Return whether an answer has the fact in it, as whole words."""
        return bool(answer_scores(self.answers[way], [self.fact], self.answers[0])["contains"])

    def agrees(self, way: int) -> bool:
        """Return whether an answer is plain transformers'."""
        return bool(exact_match(self.answers[way], self.answers[0]))


def ask(engine: FusedKVEngine, rag: Rag, entry: DemoQuestion, args: argparse.Namespace) -> Answered:
    """Answer one question three ways."""
    rows = compare(
        engine, rag.prompt(entry["question"]).text, ratios=(args.ratio, 0.0), max_tokens=args.max_tokens, stop=DEMO.stop
    )
    return Answered(entry["question"], entry["answer"], tuple(" ".join(row.answer.split()) for row in rows))


def count(answered: list[Answered], title: str) -> str:
    """Return one line of the table: of so many questions, how many are right and agree."""
    right = [one for one in answered if one.holds(0)]
    cells = [len(answered), len(right)]
    for way in (1, 2):
        cells.append(sum(one.holds(way) for one in answered))
        cells.append(sum(one.agrees(way) for one in answered))
        cells.append(sum(one.holds(way) and one.agrees(way) for one in right))
    return f"| {title} | " + " | ".join(map(str, cells)) + " |"


def table(answered: list[Answered], args: argparse.Namespace) -> str:
    """Return the record: counts, and every answer."""
    stamp = environment()
    lines = [
        "# The demo's questions\n",
        f"SmolLM2-135M, {args.dtype}, {args.k} passages, ratio {args.ratio:g}, {stamp['cpu']}. `{stamp['command']}`\n",
        "| questions | asked | plain: fact | fused: fact | agrees | both | full reuse: fact | agrees | both |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        count(answered[:12], "first passage of each file"),
        count(answered, "first three passages of each file"),
        "\nBoth: the fact and plain's words. +: the fact is there; =: plain's words.\n",
    ]
    for one in answered:
        lines.append(f"\n{one.question} **{one.fact}**\n")
        for way, name in enumerate(WAYS):
            marks = ("+" if one.holds(way) else "-") + ("=" if one.agrees(way) else " ")
            lines.append(f"- `{marks}` {name}: {one.answers[way]}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=DEMO.ratio)
    parser.add_argument("--k", type=int, default=DEMO.passages, help="passages in a prompt")
    parser.add_argument("--max-tokens", type=int, default=DEMO.max_tokens)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "demo_questions")
    args = parser.parse_args()
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-demo-"))
    passages = read_passages([handbook_folder()])
    with FusedKVEngine("smollm2-135m", kv_dir=kv_dir, dtype=args.dtype) as engine:
        args.dtype = engine.dtype
        print(engine.build_kv_cache([passage.text for passage in passages]).summary())
        index = PassageIndex.update(
            kv_dir, passages, model="smollm2-135m", dtype=engine.dtype, kv_dtype=engine.kv_dtype, embedder=MiniLM()
        )
        rag = Rag(index, engine, k=args.k, max_tokens=args.max_tokens)
        answered = [ask(engine, rag, entry, args) for entry in track(handbook_questions(), description="Asking")]
    text = table(answered, args)
    print(text)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    result = {"environment": environment(), "k": args.k, "ratio": args.ratio, "dtype": args.dtype}
    rows = [asdict(one) for one in answered]
    args.out.with_suffix(".json").write_text(
        json.dumps({**result, "ways": WAYS, "answered": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
