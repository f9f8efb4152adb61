"""Time to first token of a model of Qwen2.5-7B's shape on a GPU: plain transformers and the fused engine.

    python benchmarks/ttft_gpu.py               # 8K, 16K and 32K tokens, bfloat16
    python benchmarks/ttft_gpu.py --toy         # a tiny model on any machine: a check that it runs, not a measurement

The weights are random: time does not depend on them. The words of the prompts are one token each, so that no tokenizer
has to be fetched. Chunk KV comes from disk, from the memory tier (pinned, where there is a GPU), or from the GPU's own
memory: there the memory tier's tensors are moved to the device beforehand, which the engine has no tier for.

Afterwards, decoding: milliseconds a token of plain transformers, of the engine, and of the engine's step recorded in a
CUDA graph (:mod:`static_decode`), which the engine will do if it measures better.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from decoding import measure_decoding
from environment import environment
from random_model import SHAPE_7B, SHAPE_TOY, Prompt, build_model, word_tokenizer
from rich.console import Console
from rich.table import Table

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_SELECTOR
from fused_kv_llm.demo import drop_page_cache
from fused_kv_llm.model.attention import ATTENTION_NAME

mpl.use("Agg")
import matplotlib.pyplot as plt

RATIOS = (0.0, 0.15, 0.3)
# The one that has bounds (gpu_bounds.py) comes first: whoever has little time has it.
LENGTHS = (32768, 8192, 16384)


def plain_s(model: Any, ids: list[int]) -> float:
    """Return the seconds of a plain prefill with SDPA up to the first token."""
    model.set_attn_implementation("sdpa")
    try:
        started = time.perf_counter()
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device=model.device), use_cache=True, logits_to_keep=1).logits
            int(logits[0, -1].argmax())
        return time.perf_counter() - started
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def move_to_device(engine: FusedKVEngine) -> None:
    """Let the memory tier's chunks lie on the model's device."""
    for chunk in engine.store._parts.memory._chunks.values():
        for name, tensor in chunk.tensors.items():
            chunk.tensors[name] = tensor.to(engine.model.device)


def measure(prompt: Prompt, kv_dir: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all configurations in turn, `repeats` rounds after one to warm up."""
    engine, times, reports = prompt.engine, dict[str, list[float]](), dict[str, Any]()

    def fused(source: str, ratio: float, keep: bool) -> None:
        if source == "disk":
            engine.store.drop_memory()
            drop_page_cache(kv_dir)
        elif source == "GPU memory":
            move_to_device(engine)
        report = engine.generate(prompt.text, max_tokens=1, recompute_ratio=ratio, selector=args.selector).report
        if keep:
            times.setdefault(f"fused {ratio:g}, {source}", []).append(report.ttft_s)
            reports[f"fused {ratio:g}, {source}"] = report

    for turn in range(args.repeats + 1):
        seconds = plain_s(engine.model, prompt.ids)
        if turn:
            times.setdefault("plain", []).append(seconds)
        for ratio in RATIOS:
            # Reading once from disk puts the chunks into the memory tier; the first round also tunes the kernels.
            for source in ("disk", "pinned memory", "GPU memory"):
                fused(source, ratio, keep=turn > 0)
    plain = statistics.median(times["plain"])
    return [
        {
            "prompt_tokens": len(prompt.ids),
            "what": name,
            "ttft_s": statistics.median(found),
            "all_s": found,
            "times_sooner": plain / statistics.median(found),
            "reused_tokens": reports[name].reused_tokens if name in reports else None,
            "recomputed_tokens": reports[name].recomputed_tokens if name in reports else None,
            "stages_s": reports[name].seconds if name in reports else None,
        }
        for name, found in times.items()
    ]


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Print one line a configuration."""
    table = Table(title=title)
    for column in ("prompt", "what", "TTFT ms", "x sooner", "reused", "recomputed"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        counts = ("" if row[name] is None else str(row[name]) for name in ("reused_tokens", "recomputed_tokens"))
        numbers = (f"{1000 * row['ttft_s']:.1f}", f"{row['times_sooner']:.1f}")
        table.add_row(str(row["prompt_tokens"]), row["what"], *numbers, *counts)
    Console(width=110).print(table)


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw TTFT against prompt length."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name in dict.fromkeys(row["what"] for row in rows):
        points = sorted((row["prompt_tokens"], 1000 * row["ttft_s"]) for row in rows if row["what"] == name)
        style = {"plain": "k-"}.get(
            name, "--" if name.endswith("disk") else ":" if name.endswith("GPU memory") else "-"
        )
        axes.plot(*zip(*points, strict=True), style, marker="o", label=name)
    axes.set_yscale("log")
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("time to first token (ms, log scale)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Run the benchmark; return 1 if a length or a way to decode failed, however much else was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--selector", default=DEFAULT_SELECTOR)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="a tiny model at 1K and 2K tokens, on whatever there is")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no length after so many; the rest fails")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    # A toy's figures are no results.
    folder = Path(tempfile.gettempdir()) if args.toy else Path(__file__).parent / "results"
    args.out = args.out or folder / f"ttft_{'toy' if args.toy else 'gpu'}"
    if args.toy:
        args.lengths, args.repeats = [1024, 2048], 1
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device: --toy checks that the benchmark runs")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    args.words = 1000 if args.toy else 50_000
    vocabulary = args.words + 2 if args.toy else 152_064
    model = build_model(SHAPE_TOY if args.toy else SHAPE_7B, vocabulary, device, dtype)
    stamp = environment()
    result: dict[str, Any] = {"environment": stamp, "selector": args.selector, "toy": args.toy}
    result |= {"rows": [], "decoding": [], "failed": []}
    with tempfile.TemporaryDirectory(prefix="fused-kv-bench-") as kv_dir:
        engine = FusedKVEngine(
            model, tokenizer=word_tokenizer(args.words), kv_dir=kv_dir, memory_bytes=16 * 2**30,
            preprocessing="none", store_misses=False, wrap_chat_template=False,
            prefix_cache_bytes=0,
        )  # fmt: skip
        measure_lengths(engine, Path(kv_dir), args, result)
        engine.close()
    shape = "a tiny model" if args.toy else "a random model of Qwen2.5-7B's shape"
    title = f"{shape}, {str(dtype).removeprefix('torch.')}, {stamp['gpu'] or stamp['cpu']}, selector {args.selector}"
    print_table(result["rows"], title)
    for row in result["decoding"]:
        found = f"{1000 * row['token_s']:.2f} ms a token" if "token_s" in row else row["failed"]
        print(f"{row['prompt_tokens']} tokens, {row['what']}: {found}")
    draw(result["rows"], args.out.with_suffix(".png"), title)
    print("\n".join(result["failed"]))
    return int(bool(result["failed"]) or any("failed" in row for row in result["decoding"]))


def measure_lengths(engine: FusedKVEngine, kv_dir: Path, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure one length after another into `result`, written after each: what is cut off keeps what it has."""
    until = time.monotonic() + 60 * args.minutes
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for length in args.lengths:
        if time.monotonic() >= until:
            result["failed"].append(f"{length} tokens: not begun within {args.minutes:g} minutes")
            continue
        try:
            prompt = Prompt.ingested(engine, length, args.words)
            result["rows"] += measure(prompt, kv_dir, args)
            args.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
            result["decoding"] += measure_decoding(prompt)
        except Exception as error:
            traceback.print_exc()
            result["failed"].append(f"{length} tokens: {type(error).__name__}: {error}")
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
        print(f"{length} tokens measured", flush=True)


if __name__ == "__main__":
    sys.exit(main())
