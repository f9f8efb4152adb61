"""Write RULER-style question sets that ``benchmarks/quality.py`` reads.

    python benchmarks/ruler.py --out ruler_data --words 1500 --questions 100
    python benchmarks/quality.py --data ruler_data/*.jsonl --passages 10 --order file --answers 64 --frame instruct

Made-up text from fixed word lists: nothing is downloaded, and the same seed writes the same files. The share of the
expected strings that an answer contains is the column "answers found".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from evaluation.ruler import TASKS, make_ruler


def main() -> None:
    """Write one file a task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--words", type=int, default=1500, help="length of the context")
    parser.add_argument("--passages", type=int, default=10)
    parser.add_argument("--needles", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.questions < 1 or args.passages < 1:
        parser.error("--questions and --passages begin at 1")
    args.out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        try:
            questions = make_ruler(
                task, args.questions, words=args.words, passages=args.passages, needles=args.needles, seed=args.seed
            )
        except ValueError as error:
            parser.error(str(error))
        path = args.out / f"ruler_{task}_{args.words}.jsonl"
        path.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
