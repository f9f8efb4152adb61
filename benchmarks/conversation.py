"""A conversation of six turns over retrieved chunks, with and without what earlier turns have left.

    python benchmarks/conversation.py --data ../shared/data/squad10.jsonl

The first turn has a question's passages before it; later turns ask on. All engines get the same messages, whose answers
are those of the first one, so that prompts are equal. Tokens that went through the model do not depend on the machine;
seconds do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from environment import environment
from evaluation.questions import read_questions

from fused_kv_llm import FusedKVEngine

_TURNS = 6
_FOLLOW_UPS = (
    "Which passage says so?", "Is there anything else that is said about it?", "When was that?",
    "Who else is mentioned?", "Sum it up in one sentence, please.",
)  # fmt: skip


def conversation(engine: FusedKVEngine, first: str, max_tokens: int, **options: Any) -> list[list[dict[str, str]]]:
    """Return the messages of every turn."""
    messages, turns = [{"role": "user", "content": first}], []
    for asked in (*_FOLLOW_UPS, ""):
        turns.append(list(messages))
        answer = engine.generate(messages, max_tokens=max_tokens, **options).text
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": asked}]
    return turns


def measure(engine: FusedKVEngine, turns: list[list[dict[str, str]]], max_tokens: int, **options: Any) -> list[Any]:
    """Return tokens computed, tokens of the prompt, seconds to the first token and the answer of every turn."""
    engine.clear_prefix_cache()
    answers = [engine.generate(messages, max_tokens=max_tokens, **options) for messages in turns]
    return [[one.report.computed_tokens, one.report.prompt_tokens, one.report.ttft_s, one.token_ids] for one in answers]


def summary(kept: list[list[Any]], plain: list[list[Any]]) -> dict[str, Any]:
    """Return what turns 2 to 6 of some conversations computed and took."""
    later = [[one[1:] for one in found] for found in (kept, plain)]
    tokens = [[sum(turn[0] for turn in one) for one in found] for found in later]
    ttft_s = [[statistics.mean(turn[2] for turn in one) for one in found] for found in later]
    return {
        "computed_tokens": [statistics.median(found) for found in tokens],
        "fewer_tokens": round(sum(tokens[1]) / sum(tokens[0]), 2),
        "ttft_s": [round(statistics.median(found), 4) for found in ttft_s],
        "sooner": round(statistics.median(ttft_s[1]) / statistics.median(ttft_s[0]), 2),
        "equal_answers": sum(a[3] == b[3] for one, other in zip(kept, plain, strict=True)
                             for a, b in zip(one, other, strict=True)),
        "turns": sum(map(len, kept)),
    }  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--passages", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1.0, 0.15])
    parser.add_argument("--out", type=Path, default=None, help="where the record is written; none by default")
    args = parser.parse_args()
    questions = read_questions(args.data, args.conversations, args.passages)
    result: dict[str, Any] = {"environment": environment(), "passages": args.passages, "ratios": {}}
    with tempfile.TemporaryDirectory() as folder:
        options = {"kv_dir": folder, "dtype": args.dtype, "preprocessing": "none", "store_misses": False}
        with (
            FusedKVEngine("smollm2-135m", prefix_cache_bytes=None, **options) as keeps,
            FusedKVEngine(keeps.loaded, prefix_cache_bytes=0, **options) as plain,
        ):
            keeps.build_kv_cache([text for one in questions for text in one.passages], progress=False)
            for ratio in args.ratios:
                found: tuple[list[Any], list[Any]] = [], []
                for question in questions:
                    turns = conversation(keeps, question.prompt("instruct"), args.max_tokens, recompute_ratio=ratio)
                    for engine, rows in zip((keeps, plain), found, strict=True):
                        rows.append(measure(engine, turns, args.max_tokens, recompute_ratio=ratio))
                result["ratios"][str(ratio)] = summary(*found)
                print(ratio, json.dumps(result["ratios"][str(ratio)]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
