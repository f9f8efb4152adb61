"""Time to first token: plain transformers and the fused engine, same prompts, one process, side by side.

    python benchmarks/ttft.py                         # 1k to 7k tokens, default dtype
    python benchmarks/ttft.py --lengths 3600 --dtype float32 --repeats 5
    python benchmarks/ttft.py --model gemma3-270m --lengths 3000 --out benchmarks/results/ttft_gemma_cpu

Prompts are built from the embedded handbook. At ratio 1 the engine reuses nothing, so its time against plain
transformers is what its CPU operators gain ("operators"). Its time at ratio 1 against its time at a lower ratio is what
stored KV gains ("reuse"); the two multiply to the whole. "limit" is a plain prefill of as many tokens as the engine
computed: no selective recomputation can be faster with the same model code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from environment import environment
from gemma import model_source
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_SELECTOR
from fused_kv_llm.demo import drop_page_cache, handbook_passages, handbook_questions
from fused_kv_llm.model.pretrained import locate

mpl.use("Agg")
import matplotlib.pyplot as plt

RATIOS = (0.0, 0.05, 0.15, 0.3, 1.0)


def build_prompt(engine: FusedKVEngine, passages: list[str], question: str, num_tokens: int) -> str:
    """Return the retrieval prompt whose length is nearest to `num_tokens` tokens."""
    frame = "Answer the question from the context.\n\nContext:\n{}\n\nQuestion: {}\nAnswer briefly."
    if not engine.renderer.template_source:
        # A base model goes on with a text; it follows no instructions.
        frame = "Context:\n{}\n\nQuestion: {}\nAnswer:"
    prompts = [frame.format("\n\n".join(passages[:count]), question) for count in range(1, len(passages) + 1)]
    lengths = [len(engine.encode(prompt)) for prompt in prompts]
    return prompts[min(range(len(prompts)), key=lambda i: abs(lengths[i] - num_tokens))]


def plain_ttft(engine: FusedKVEngine, plain: Any, prompt: str) -> float:
    """Return the seconds plain transformers takes from the prompt's text to the first token."""
    started = time.perf_counter()
    ids = torch.tensor([engine.encode(prompt)], device=plain.device)
    with torch.inference_mode():
        int(plain(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
    return time.perf_counter() - started


def prefill_s(plain: Any, ids: list[int]) -> float:
    """Return the seconds of a plain prefill of these ids."""
    tensor = torch.tensor([ids], device=plain.device)
    started = time.perf_counter()
    with torch.inference_mode():
        plain(tensor, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


def measure(engine: FusedKVEngine, plain: Any, prompt: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one prompt: every configuration in turn, `repeats` rounds, so that drift hits all alike."""
    ids = engine.encode(prompt)
    timings: dict[str, list[float]] = {}
    reports: dict[str, Any] = {}

    def fused(name: str, ratio: float, prepare: Callable[[], None]) -> None:
        prepare()
        report = engine.generate(prompt, max_tokens=1, recompute_ratio=ratio, selector=args.selector).report
        timings.setdefault(name, []).append(report.ttft_s)
        reports[name] = report

    def cold() -> None:
        engine.store.drop_memory()
        drop_page_cache(args.kv_dir)

    for ratio in RATIOS:
        fused(f"fused {ratio:g} warm", ratio, lambda: None)
    timings.clear()
    for _ in range(args.repeats):
        timings.setdefault("plain", []).append(plain_ttft(engine, plain, prompt))
        for ratio in RATIOS:
            engine.generate(prompt, max_tokens=1, recompute_ratio=0.0)
            fused(f"fused {ratio:g} warm", ratio, lambda: None)
            if ratio < 1.0:
                computed = reports[f"fused {ratio:g} warm"].computed_tokens
                timings.setdefault(f"limit {ratio:g}", []).append(prefill_s(plain, ids[:computed]))
                fused(f"fused {ratio:g} cold", ratio, cold)
    best = {name: statistics.median(times) for name, times in timings.items()}
    rows = []
    for name, seconds in best.items():
        report = reports.get(name)
        ratio = name.split()[1] if " " in name else ""
        rows.append(
            {
                "prompt_tokens": len(ids),
                "what": name,
                "ttft_s": seconds,
                "all_s": timings[name],
                "speedup": best["plain"] / seconds,
                **(split(best, seconds) if name.startswith("fused") else {}),
                "times_limit": seconds / best[f"limit {ratio}"] if f"limit {ratio}" in best else None,
                "computed_tokens": report.computed_tokens if report else None,
                "recomputed_tokens": report.recomputed_tokens if report else None,
                "reused_tokens": report.reused_tokens if report else None,
                "bytes_loaded": report.bytes_loaded if report else None,
                "sidecar_bytes_loaded": report.sidecar_bytes_loaded if report else None,
                "stages_s": report.seconds if report else None,
            }
        )
    return rows


def split(best: dict[str, float], seconds: float) -> dict[str, float]:
    """Return what the operators and what stored KV contribute to a speed-up; their product is the speed-up."""
    nothing_reused = best["fused 1 warm"]
    return {"operators": best["plain"] / nothing_reused, "reuse": nothing_reused / seconds}


def measure_memory(args: argparse.Namespace, prompt: str) -> dict[str, float]:
    """Measure one request's memory in a process of its own, where nothing else has been run before."""
    script = Path(__file__).parent / "memory.py"
    command = [
        sys.executable,
        str(script),
        "--model",
        model_source(args.model),
        "--kv-dir",
        str(args.kv_dir),
        *(["--dtype", args.dtype] if args.dtype else []),
    ]
    done = subprocess.run(command, input=prompt, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """Print one line a configuration."""
    table = Table(title=title)
    for column in ("prompt", "what", "TTFT s", "x sooner", "operators", "reuse", "x limit", "recomputed", "computed"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        table.add_row(
            str(row["prompt_tokens"]),
            row["what"],
            f"{row['ttft_s']:.3f}",
            f"{row['speedup']:.1f}",
            *(f"{row[part]:.1f}" if part in row else "" for part in ("operators", "reuse")),
            f"{row['times_limit']:.2f}" if row["times_limit"] else "",
            "" if row["recomputed_tokens"] is None else str(row["recomputed_tokens"]),
            "" if row["computed_tokens"] is None else str(row["computed_tokens"]),
        )
    Console(width=110).print(table)


def draw(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw TTFT against prompt length, one line a ratio."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    names = ["plain"] + [f"fused {ratio:g} warm" for ratio in reversed(RATIOS)]
    labels = {
        "plain": "plain transformers (SDPA)",
        "fused 0 warm": "fused, full reuse",
        "fused 1 warm": "ratio 1: nothing reused, faster operators",
    }
    for name, colour in zip(names, ["black", "#7f7f7f", "#d95f02", "#1b9e77", "#7570b3", "#e7298a"], strict=True):
        points = sorted((r["prompt_tokens"], r["ttft_s"]) for r in rows if r["what"] == name)
        ratio = name.removeprefix("fused ").removesuffix(" warm")
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            color=colour,
            label=labels.get(name, f"fused, ratio {ratio}"),
        )
        axes.annotate(
            f"{points[-1][1]:.2f} s",
            points[-1],
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
        )
    axes.set_yscale("log")
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("time to first token (s, log scale)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    axes.margins(x=0.1)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 3600, 5000, 7000])
    parser.add_argument("--model", default="smollm2-135m", help="what the engine takes, or gemma3-270m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--selector", default=DEFAULT_SELECTOR)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ttft_cpu")
    args = parser.parse_args()
    args.kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-bench-"))
    source = model_source(args.model)
    engine = FusedKVEngine(source, kv_dir=args.kv_dir, dtype=args.dtype, memory_bytes=4 * 2**30, prefix_cache_bytes=0)
    plain = AutoModelForCausalLM.from_pretrained(
        locate(source)[1], dtype=engine.loaded.dtype, attn_implementation="sdpa"
    ).eval()
    passages, question = handbook_passages(), handbook_questions()[0]["question"]
    prompts = [build_prompt(engine, passages, question, length) for length in args.lengths]
    used = [passage for passage in passages if any(passage in prompt for prompt in prompts)]
    print(engine.build_kv_cache(used, preprocess="wait").summary())
    rows: list[dict[str, Any]] = []
    for prompt in track(prompts, description="Measuring"):
        rows += measure(engine, plain, prompt, args)
    memory = measure_memory(args, prompts[len(prompts) // 2])
    stamp = environment()
    title = f"{args.model}, {engine.dtype}, {stamp['cores']} cores of {stamp['cpu']}, selector {args.selector}"
    print_table(rows, title)
    print(f"One request from disk: peak resident size {memory['times_kv']:.2f} x its KV above the model")
    result = {
        "environment": stamp,
        "model": args.model,
        "dtype": engine.dtype,
        "selector": args.selector,
        "rows": rows,
        "memory": memory,
    }
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
    draw(rows, args.out.with_suffix(".png"), title)
    engine.close()


if __name__ == "__main__":
    main()
