"""Whether questions that are made from a corpus calibrate as its users' questions do.

A store holds the passages of some articles. It is calibrated three times: by questions that people asked of these
passages (those that are not held back), by questions that the model writes, and by quoted sentences. The result has
every question's agreement at every ratio, what is chosen at several targets, and how far the curves are apart. A run
that was stopped goes on with the kinds of questions that are wanting.

    python benchmarks/calibration.py --data squad10.jsonl --questions 80

`--show 30` only has questions written for chunks of a corpus (one object with a `text` a line), to be judged by people:

    python benchmarks/calibration.py --data corpus_squad.jsonl --show 30
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from environment import environment
from evaluation.questions import is_held_back, read_lines

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.offline import retriever_of
from fused_kv_llm.tuning import CalibrationPoint, calibrate
from fused_kv_llm.tuning.calibration_choice import choose
from fused_kv_llm.tuning.confidence import lower_bound
from fused_kv_llm.tuning.written_questions import made_questions

RATIOS = (0.0, 0.05, 0.15, 0.3, 0.5)
TARGETS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
CONFIDENCE = 0.95
KINDS = ("asked", "written", "quoted")


def chosen_articles(path: Path, count: int) -> tuple[list[str], list[str]]:
    """Return `count` questions that are not held back, article by article, and all passages of their articles."""
    records = read_lines(path)
    articles = list(dict.fromkeys(record["passages"][0]["title"] for record in records))
    questions, titles = list[str](), set[str]()
    for title in articles:
        if len(questions) >= count:
            break
        of_it = [one for one in records if one["passages"][0]["title"] == title and not is_held_back(one["id"])]
        questions += [one["question"] for one in of_it]
        titles.add(title)
    texts = [p["text"] for record in records for p in record["passages"] if p["title"] in titles]
    return list(dict.fromkeys(questions))[:count], list(dict.fromkeys(texts))


def choices(points: Sequence[CalibrationPoint]) -> dict[str, Any]:
    """Return the ratio that is chosen at each target: with confidence, and by the mean alone."""
    return {
        f"{target:g}": {
            "with_confidence": _ratio(choose(points, target, CONFIDENCE).point),
            "by_the_mean": min((one.ratio for one in points if one.agreement >= target), default=1.0),
        }
        for target in TARGETS
    }


def _ratio(point: CalibrationPoint | None) -> float:
    return 1.0 if point is None else point.ratio


def compared(measured: dict[str, Any]) -> dict[str, Any]:
    """Return how far made questions are from asked ones: in their curves, with intervals, and in what is chosen."""
    asked = measured["asked"]
    found = {}
    for kind in [kind for kind in KINDS[1:] if kind in measured]:
        other = measured[kind]
        found[kind] = {
            "difference": {r: _difference(other["agreements"][r], asked["agreements"][r]) for r in asked["mean"]},
            "same_choice": {
                rule: fmean(float(other["choices"][t][rule] == asked["choices"][t][rule]) for t in asked["choices"])
                for rule in ("with_confidence", "by_the_mean")
            },
        }
    return found


def _difference(made: Sequence[float], asked: Sequence[float]) -> dict[str, float]:
    """Return the difference of two means and its 95 % interval, a bootstrap over questions."""
    drawn = np.random.default_rng(0)
    means = [drawn.choice(values, (10_000, len(values))).mean(1) for values in (made, asked)]
    low, high = np.quantile(means[0] - means[1], (0.025, 0.975)).round(4).tolist()
    return {"mean": round(fmean(made) - fmean(asked), 4), "low": low, "high": high}


def show(path: Path, count: int) -> None:
    """Print questions that the model writes for chunks of a corpus, each with its chunk."""
    texts = [record["text"] for record in read_lines(path)]
    with (
        tempfile.TemporaryDirectory() as folder,
        FusedKVEngine("smollm2-135m", kv_dir=folder, preprocessing="none", store_misses=False) as engine,
    ):
        made = made_questions(engine, texts, count, retriever_of(texts, Path(folder)))
    print(f"{made.written} written for {made.chunks_tried} chunks; thrown out: {made.faults}")
    for question, chunk in made.asked:
        print(f"\n{question}\n    {' '.join(chunk.split())}")


def main() -> None:
    """Calibrate a store by each kind of questions, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=80)
    parser.add_argument("--kv-dir", type=Path, help="a store to keep; by default a temporary one")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/calibration_cpu.json"))
    parser.add_argument("--show", type=int, help="print so many written questions with their chunks, and end")
    args = parser.parse_args()
    if args.show:
        show(args.data, args.show)
        return
    questions, texts = chosen_articles(args.data, args.questions)
    result: dict[str, Any] = {
        "environment": environment(),
        "settings": {
            "data": args.data.name, "part": "dev", "questions": len(questions), "chunks": len(texts),
            "confidence": CONFIDENCE, "chunks_in_a_prompt": 5, "answer_tokens": 16,
        },
        "kinds": {},
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        FusedKVEngine("smollm2-135m", kv_dir=args.kv_dir or folder, store_misses=False) as engine,
    ):
        result["settings"] |= {"model": engine.model_id, "dtype": engine.dtype, "selector": engine.selector}
        engine.build_kv_cache(texts, preprocess="wait", progress=True)
        if args.out.exists():
            before = json.loads(args.out.read_text(encoding="utf-8"))
            result["kinds"] = before["kinds"] if before["settings"] == result["settings"] else {}
        for kind in [kind for kind in KINDS if kind not in result["kinds"]]:
            given = questions if kind == "asked" else None
            found = calibrate(
                engine, given, ratios=RATIOS, num_questions=len(questions), written=kind == "written", track=_counted
            )
            result["kinds"][kind] = {
                "mean": {f"{p.ratio:g}": round(p.agreement, 4) for p in found.points},
                "at_least": {f"{p.ratio:g}": round(lower_bound(p.agreements, CONFIDENCE), 4) for p in found.points},
                "choices": choices(found.points),
                "advice": found.advice,
                "questions": found.chosen.asked,
                "chunks_tried": found.made.chunks_tried if found.made else None,
                "faults": found.made.faults if found.made else None,
                "first_questions": [question for question, _ in found.made.asked[:30]] if found.made else None,
                "agreements": {f"{p.ratio:g}": [round(one, 4) for one in p.agreements] for p in found.points},
            }
            print(kind, result["kinds"][kind]["mean"], flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    result["compared_with_asked"] = compared(result["kinds"])
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _counted(items: Sequence[tuple[str, str]]) -> Any:
    for number, item in enumerate(items, start=1):
        if number % 10 == 0:
            print(number, "of", len(items), flush=True)
        yield item


if __name__ == "__main__":
    main()
