"""How close fused answers are to plain transformers, by prompt length and ratio.

    python benchmarks/fidelity.py --model gemma3-270m --lengths 1500 3000 --dtype float32

Prompts are built from the embedded handbook: for each question other passages, in random order. Plain transformers
answers greedily; its tokens are then given to the engine one after the other, and before each of them the two
distributions are compared. At ratio 1 nothing is reused: the difference of logits is that of the forwards alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from environment import environment
from gemma import model_source
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import AutoModelForCausalLM

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_SELECTOR
from fused_kv_llm.demo import handbook_passages, handbook_questions
from fused_kv_llm.model.pretrained import locate

_FRAME = "Context:\n{}\n\nQuestion: {}\nAnswer:"


def build_prompt(engine: FusedKVEngine, passages: list[str], question: str, num_tokens: int) -> str:
    """Return the longest prompt of at most `num_tokens` tokens, its passages drawn by the question."""
    drawn = random.Random(question).sample(passages, len(passages))
    prompts = [_FRAME.format("\n\n".join(drawn[:count]), question) for count in range(1, len(drawn) + 1)]
    fitting = [prompt for prompt in prompts if len(engine.encode(prompt)) <= num_tokens]
    return fitting[-1]


def plain_answer(plain: Any, ids: list[int], num_tokens: int) -> tuple[Tensor, list[int]]:
    """Return plain transformers' logits ``[num_tokens, vocabulary]`` before each token it answers, and the tokens."""
    rows, answer, cache = [], list[int](), None
    given = torch.tensor([ids])
    with torch.inference_mode():
        for _ in range(num_tokens):
            out = plain(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            rows.append(out.logits[0, -1].float())
            answer.append(int(rows[-1].argmax()))
            given = torch.tensor([answer[-1:]])
    return torch.stack(rows), answer


def fused_logits(engine: FusedKVEngine, prompt: str, answer: list[int], **options: Any) -> tuple[Tensor, Any]:
    """Return the engine's logits before each token of the answer, and its report."""
    fused, report = engine.prefill(prompt, max_tokens=len(answer) + 1, **options)
    try:
        return torch.cat((fused.logits[None], fused.append(engine.loaded, answer[:-1]))).float(), report
    finally:
        fused.cache.release()


def compare(engine: FusedKVEngine, plain: Any, prompt: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record a ratio."""
    ids = engine.encode(prompt)
    wanted, answer = plain_answer(plain, ids, args.answer)
    records = []
    for ratio in args.ratios:
        got, report = fused_logits(engine, prompt, answer, recompute_ratio=ratio, selector=args.selector)
        loss = kl_div(log_softmax(got, -1), log_softmax(wanted, -1), log_target=True, reduction="none").sum(-1)
        records.append(
            {
                "prompt_tokens": len(ids),
                "ratio": ratio,
                "kl": float(loss.mean()),
                "largest_difference": float((got - wanted).abs().max()),
                "same_tokens": got.argmax(-1).tolist() == answer,
                "top1_agreement": float((got.argmax(-1) == torch.tensor(answer)).float().mean()),
                "reused_tokens": report.reused_tokens,
                "recomputed_tokens": report.recomputed_tokens,
            }
        )
    return records


def summarise(length: int, ratio: float, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row: means, and the worst difference."""
    chosen = [record for record in records if record["ratio"] == ratio]
    return {
        "length": length,
        "ratio": ratio,
        "prompts": len(chosen),
        "prompt_tokens": statistics.mean(record["prompt_tokens"] for record in chosen),
        "kl": statistics.mean(record["kl"] for record in chosen),
        "top1_agreement": statistics.mean(record["top1_agreement"] for record in chosen),
        "largest_difference": max(record["largest_difference"] for record in chosen),
        "all_tokens_same": all(record["same_tokens"] for record in chosen),
    }


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Print one line a length and ratio."""
    table = Table(title=title)
    for column in ("length", "ratio", "prompts", "KL", "top-1", "largest difference", "same tokens"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            *(f"{row['length']:,}", f"{row['ratio']:g}", str(row["prompts"]), f"{row['kl']:.4f}"),
            *(f"{row['top1_agreement']:.1%}", f"{row['largest_difference']:.1e}", str(row["all_tokens_same"])),
        )
    Console(width=110).print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what the engine takes, or gemma3-270m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1500, 3000])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.15, 1.0])
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--passages", type=int, default=30, help="of the handbook, from which prompts are drawn")
    parser.add_argument("--answer", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--selector", default=DEFAULT_SELECTOR)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fidelity_cpu.json")
    args = parser.parse_args()
    source = model_source(args.model)
    passages = random.Random(0).sample(handbook_passages(), args.passages)
    questions = [question["question"] for question in handbook_questions()[: args.questions]]
    with (
        tempfile.TemporaryDirectory(prefix="fused-kv-fidelity-") as folder,
        FusedKVEngine(source, kv_dir=folder, dtype=args.dtype, device="cpu") as engine,
    ):
        plain = AutoModelForCausalLM.from_pretrained(locate(source)[1], dtype=engine.loaded.dtype).eval()
        print(engine.build_kv_cache(passages, preprocess="wait").summary())
        rows, records = [], []
        for length in args.lengths:
            prompts = [build_prompt(engine, passages, question, length) for question in questions]
            found = [r for p in track(prompts, description=str(length)) for r in compare(engine, plain, p, args)]
            rows += [summarise(length, ratio, found) for ratio in args.ratios]
            records += found
        print_table(rows, f"{args.model}, {engine.dtype}, selector {args.selector}")
    head = {"environment": environment(), "model": args.model, "dtype": args.dtype, "selector": args.selector}
    args.out.write_text(json.dumps({**head, "rows": rows, "records": records}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
