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
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from environment import drop_page_cache, environment
from rich.console import Console
from rich.table import Table
from static_decode import StaticDecoder
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_SELECTOR

mpl.use("Agg")
import matplotlib.pyplot as plt

RATIOS = (0.0, 0.15, 0.3)
CHUNK_WORDS = 512
QUESTION_WORDS = 32
DECODED_TOKENS = 32
SHAPE_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
SHAPE_TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def word_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words ``w0`` ... are one token each."""
    vocabulary = {"<end>": 0, "<unknown>": 1} | {f"w{i}": i + 2 for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>")


def random_words(count: int, words: int, seed: int) -> str:
    """Return that many random words."""
    drawn = torch.randint(words, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{word}" for word in drawn)


def build_model(shape: dict[str, int], vocabulary: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a randomly initialised model, made where it is used."""
    config = Qwen2Config(**shape, vocab_size=vocabulary, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
                         tie_word_embeddings=False, eos_token_id=0, pad_token_id=0)  # fmt: skip
    with device:
        torch.set_default_dtype(dtype)
        try:
            return Qwen2ForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def plain_s(model: Any, ids: list[int]) -> float:
    """Return the seconds of a plain prefill with SDPA up to the first token."""
    model.set_attn_implementation("sdpa")
    started = time.perf_counter()
    with torch.inference_mode():
        logits = model(torch.tensor([ids], device=model.device), use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())
    return time.perf_counter() - started


def move_to_device(engine: FusedKVEngine) -> None:
    """Let the memory tier's chunks lie on the model's device."""
    for chunk in engine.store._memory._chunks.values():
        for name, tensor in chunk.tensors.items():
            chunk.tensors[name] = tensor.to(engine.model.device)


def decode_s(engine: FusedKVEngine, prompt: str, ids: list[int]) -> dict[str, float]:
    """Return the median seconds a token, by who decodes."""
    found: dict[str, float] = {}

    def median_s(step: Callable[[int], Any]) -> float:
        times = []
        for token in range(DECODED_TOKENS):
            started = time.perf_counter()
            int(step(token + 2).argmax())
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])

    def fused() -> Any:
        return engine.prefill(prompt, recompute_ratio=0.0, max_tokens=DECODED_TOKENS + 1)[0]

    def released(decoder: Any, decoded: Any) -> float:
        seconds = median_s(decoder)
        decoded.cache.release()
        return seconds

    eager = fused()
    found["decode fused"] = released(lambda token: eager.append(engine.loaded, [token])[-1], eager)
    if engine.model.device.type == "cuda":
        static = fused()
        found["decode fused, CUDA graph"] = released(StaticDecoder(engine.loaded, static, graph=True).append, static)
    name = engine.model.config._attn_implementation
    engine.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        cache = engine.model(torch.tensor([ids], device=engine.model.device), use_cache=True).past_key_values

        def plain(token: int) -> Any:
            row = torch.tensor([[token]], device=engine.model.device)
            return engine.model(row, past_key_values=cache, use_cache=True).logits[0, -1]

        found["decode plain"] = median_s(plain)
    engine.model.set_attn_implementation(name)
    return found


def measure(
    engine: FusedKVEngine, kv_dir: Path, length: int, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure one prompt length: ingestion, then all configurations in turn, `repeats` rounds; then decoding."""
    words = args.words
    chunks = [random_words(CHUNK_WORDS, words, seed) for seed in range(length // CHUNK_WORDS)]
    prompt = "\n".join([*chunks, random_words(QUESTION_WORDS, words, 10**6 + length)])
    engine.build_kv_cache(chunks)
    ids = engine.encode(prompt)
    engine_name = engine.model.config._attn_implementation
    times: dict[str, list[float]] = {}
    reports: dict[str, Any] = {}

    def fused(source: str, ratio: float, keep: bool) -> None:
        if source == "disk":
            engine.store.drop_memory()
            drop_page_cache(kv_dir)
        elif source == "GPU memory":
            move_to_device(engine)
        report = engine.generate(prompt, max_tokens=1, recompute_ratio=ratio, selector=args.selector).report
        if keep:
            times.setdefault(f"fused {ratio:g}, {source}", []).append(report.ttft_s)
            reports[f"fused {ratio:g}, {source}"] = report

    for turn in range(args.repeats + 1):
        seconds = plain_s(engine.model, ids)
        engine.model.set_attn_implementation(engine_name)
        if turn:
            times.setdefault("plain", []).append(seconds)
        for ratio in RATIOS:
            # Reading once from disk puts the chunks into the memory tier; the first round also tunes the kernels.
            fused("disk", ratio, keep=turn > 0)
            fused("pinned memory", ratio, keep=turn > 0)
            fused("GPU memory", ratio, keep=turn > 0)
    plain = statistics.median(times["plain"])
    return [
        {
            "prompt_tokens": len(ids),
            "what": name,
            "ttft_s": statistics.median(found),
            "all_s": found,
            "times_sooner": plain / statistics.median(found),
            "reused_tokens": reports[name].reused_tokens if name in reports else None,
            "recomputed_tokens": reports[name].recomputed_tokens if name in reports else None,
            "stages_s": reports[name].seconds if name in reports else None,
        }
        for name, found in times.items()
    ], [{"prompt_tokens": len(ids), "what": n, "token_s": s} for n, s in decode_s(engine, prompt, ids).items()]


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


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--selector", default=DEFAULT_SELECTOR)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="a tiny model at 1K and 2K tokens, on whatever there is")
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
    with tempfile.TemporaryDirectory(prefix="fused-kv-bench-") as kv_dir:
        engine = FusedKVEngine(
            model, tokenizer=word_tokenizer(args.words), kv_dir=kv_dir, memory_bytes=16 * 2**30,
            preprocessing="none", store_misses=False, wrap=False,
        )  # fmt: skip
        rows: list[dict[str, Any]] = []
        decoding: list[dict[str, Any]] = []
        for length in args.lengths:
            first_tokens, next_tokens = measure(engine, Path(kv_dir), length, args)
            rows += first_tokens
            decoding += next_tokens
            print(f"{length} tokens measured", flush=True)
        engine.close()
    stamp = environment()
    shape = "a tiny model" if args.toy else "a random model of Qwen2.5-7B's shape"
    title = f"{shape}, {str(dtype).removeprefix('torch.')}, {stamp['gpu'] or stamp['cpu']}, selector {args.selector}"
    print_table(rows, title)
    for row in decoding:
        print(f"{row['prompt_tokens']} tokens, {row['what']}: {1000 * row['token_s']:.2f} ms a token")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": stamp, "selector": args.selector, "toy": args.toy, "rows": rows, "decoding": decoding}
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
    draw(rows, args.out.with_suffix(".png"), title)


if __name__ == "__main__":
    main()
