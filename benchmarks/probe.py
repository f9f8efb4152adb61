"""What choosing the tokens costs: the probe's share of the time to the first token, at several prompt lengths.

    python benchmarks/probe.py --data squad10.jsonl --passages 4 5 6 10 25

Chunks are in memory, nothing is preprocessed. A prompt of more passages than a question has takes those of the next
questions. Of every length some prompts are measured in turns, and the medians are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from environment import environment
from evaluation.questions import Question, read_questions

from fused_kv_llm import FusedKVEngine

_WARM_ROUNDS = 2


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a question file")
    parser.add_argument("--passages", type=int, nargs="+", default=[4, 5, 6, 10, 25], help="passages a prompt")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of every length")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--selectors", nargs="+", default=["qcfuse"])
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def _prompts(questions: Sequence[Question], passages: int, count: int) -> list[str]:
    """Return prompts of the first questions, each with its own passages and those of the ones after it."""
    prompts = []
    for first, question in enumerate(questions[:count]):
        texts = list(dict.fromkeys(text for one in questions[first:] for text in one.passages))[:passages]
        prompts.append(replace(question, passages=tuple(texts)).prompt("plain"))
    return prompts


def _measure(engine: FusedKVEngine, prompts: Sequence[str], selector: str, ratio: float, rounds: int) -> dict[str, Any]:
    """Return medians over prompts and rounds."""
    found: dict[str, list[float]] = {}
    for turn in range(_WARM_ROUNDS + rounds):
        for prompt in prompts:
            fused, report = engine.prefill(prompt, recompute_ratio=ratio, selector=selector)
            fused.cache.release()
            ttft, probe = sum(report.seconds.values()), report.seconds["probe"] + report.seconds["select"]
            measured = {
                "prompt_tokens": report.prompt_tokens,
                "fresh_tokens": report.fresh_tokens,
                "ttft_ms": 1e3 * ttft,
                "probe_ms": 1e3 * probe,
                "probe_share": probe / ttft,
                "selection_share": report.selection_bytes / max(1, sum(report.bytes_loaded.values())),
            }
            for name, value in measured.items() if turn >= _WARM_ROUNDS else ():
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Measure, print, and write where --out says."""
    arguments = _arguments()
    questions = read_questions(arguments.data, arguments.prompts + max(arguments.passages), max(arguments.passages))
    by_length = {count: _prompts(questions, count, arguments.prompts) for count in arguments.passages}
    used = list(dict.fromkeys(text for one in questions for text in one.passages))
    texts = [text for text in used if any(text in prompt for prompts in by_length.values() for prompt in prompts)]
    result: dict[str, Any] = {"environment": environment(), "settings": vars(arguments), "lengths": []}
    print(json.dumps(result["environment"], indent=1))
    with tempfile.TemporaryDirectory() as folder:
        options = {"kv_dir": arguments.kv_dir or folder, "preprocessing": "none", "store_misses": False,
                   "prefix_cache_bytes": 0}  # fmt: skip
        with FusedKVEngine(arguments.model, dtype=arguments.dtype, **options) as engine:
            engine.build_kv_cache(texts, progress=False)
            for selector in arguments.selectors:
                engine.build_anchors(texts, selector=selector, progress=False)
                for prompts in by_length.values():
                    row = _measure(engine, prompts, selector, arguments.ratio, arguments.rounds)
                    result["lengths"].append({"selector": selector, **row})
                    print(
                        f"{selector}: {row['prompt_tokens']:.0f} tokens, first token after {row['ttft_ms']:.1f} ms, "
                        f"probe {row['probe_ms']:.1f} ms = {row['probe_share']:.1%}, KV read before "
                        f"{row['selection_share']:.1%}",
                        flush=True,
                    )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
