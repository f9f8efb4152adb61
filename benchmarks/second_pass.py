"""The second pass of ingestion beside the first: seconds of both, with one, two and four prompts of each chunk.

    python benchmarks/second_pass.py --data ../shared/data/corpus_squad.jsonl --chunks 96 --dtypes float32 bfloat16

Chunks are stored without preprocessing in a fresh folder (the first pass), then preprocessed (the second pass, with the
embedding of their texts, the search for neighbours, and writing). The model and the embedder are loaded and warm. The
total over the first pass of the same run is what preprocessing makes of ingestion's time; repeats are summed up by
their medians. ``--in-full`` measures it once more without eight bits, ``--in-full attention`` with the linear layers
alone in eight bits, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from environment import environment

from fused_kv_kernels import row_attention
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import load_model
from fused_kv_llm.offline import SentenceEmbedder

_LINEARS = "fused_kv_llm.offline.preprocess.eight_bit_of"
"""What makes the linear layers of the second pass faster; without it all is computed as the model does."""

_ATTENTION = "fused_kv_llm.model.attention_rule.eight_bit_row_attention"
"""The second pass's attention."""

_WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "in full": lambda: patch(_LINEARS, lambda *_: None),
    "attention in full": lambda: patch(_ATTENTION, row_attention),
}


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with a field text")
    parser.add_argument("--chunks", type=int, default=400)
    parser.add_argument("--prompts", type=int, nargs="+", choices=(1, 2, 4), default=[1, 2, 4])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32"],
                        help="that the model computes in, one after another")  # fmt: skip
    parser.add_argument("--in-full", nargs="?", choices=("all", "attention"), const="all", help="also in this way")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "second_pass_cpu.json")
    return parser.parse_args()


def measure(loaded: Any, embedder: SentenceEmbedder, texts: list[str], prompts: int) -> dict[str, Any]:
    """Ingest texts in a fresh folder; return the seconds of both passes and the bytes written."""
    with (
        tempfile.TemporaryDirectory(prefix="fused-kv-second-pass-") as folder,
        FusedKVEngine(loaded, kv_dir=folder, embedder=embedder, preprocessing_prompts=prompts) as engine,
    ):
        started = time.perf_counter()
        first = engine.build_kv_cache(texts, preprocess="later", progress=False)
        first_s = time.perf_counter() - started
        second = engine.build_kv_cache(texts, preprocess="wait", progress=False)
        total_s = time.perf_counter() - started
    return {
        "prompts": prompts, "dtype": engine.dtype, "chunks": first.chunks_new, "tokens": first.tokens,
        "preprocessed": second.chunks_preprocessed, "first_pass_s": first_s, "total_s": total_s,
        "total_over_first": total_s / first_s, "bytes_first": first.bytes_written, "bytes_second": second.bytes_written,
    }  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    args = parse()
    lines = args.data.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines if line.strip()][: args.chunks]
    embedder, runs = SentenceEmbedder(), list[dict[str, Any]]()
    ways = ["", *{None: [], "all": ["in full"], "attention": ["attention in full"]}[args.in_full]]
    for dtype in args.dtypes:
        loaded = load_model("smollm2-135m", dtype=dtype)
        measure(loaded, embedder, texts[:40], 1)
        for number in range(args.repeats):
            for prompts, way in list(product(args.prompts, ways))[:: -1 if number % 2 else 1]:
                with _WAYS[way]():
                    runs.append({**measure(loaded, embedder, texts, prompts), "way": way})
                print(runs[-1], flush=True)
    ratios = {
        f"{dtype} {way}".rstrip(): {
            prompts: statistics.median(
                run["total_over_first"]
                for run in runs
                if (run["dtype"], run["prompts"], run["way"]) == (dtype, prompts, way)
            )
            for prompts in args.prompts
        }
        for dtype in args.dtypes
        for way in ways
    }
    print(ratios)
    result = {"environment": environment(), "total_over_first": ratios, "runs": runs}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
