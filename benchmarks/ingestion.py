"""Ingestion: chunks prefilled and written per second, against a bare batched forward of the same chunks.

    python benchmarks/ingestion.py

"bare" is plain transformers over the same length-sorted, padded batches, with nothing before the chunks and
nothing kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from environment import environment
from transformers import AutoModelForCausalLM

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import handbook_passages
from fused_kv_llm.model.embedded import embedded_model_folder
from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.preprocess import BATCH_TOKENS


def length_sorted_batches(chunks: list[PendingChunk], max_tokens: int) -> Iterator[list[PendingChunk]]:
    """Yield batches of at most `max_tokens` padded tokens, longest chunks first."""
    batch: list[PendingChunk] = []
    for chunk in sorted(chunks, key=lambda c: len(c.token_ids), reverse=True):
        if batch and len(batch[0].token_ids) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(chunk)
    yield batch


def bare_seconds(plain: torch.nn.Module, chunks: list[PendingChunk]) -> float:
    """Return the seconds of a plain forward over all batches."""
    started = time.perf_counter()
    for batch in length_sorted_batches(chunks, BATCH_TOKENS):
        ids = torch.zeros((len(batch), max(len(c.token_ids) for c in batch)), dtype=torch.int64)
        for row, chunk in enumerate(batch):
            ids[row, : len(chunk.token_ids)] = torch.tensor(chunk.token_ids)
        with torch.inference_mode():
            plain(ids, use_cache=False, logits_to_keep=1)
    return time.perf_counter() - started


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ingestion_cpu.json")
    args = parser.parse_args()
    passages = handbook_passages()
    fused, bare = [], []
    for _ in range(args.repeats):
        with FusedKVEngine(
            "smollm2-135m", kv_dir=tempfile.mkdtemp(prefix="fused-kv-ingest-"), dtype=args.dtype
        ) as engine:
            folder = embedded_model_folder("smollm2-135m")
            plain = AutoModelForCausalLM.from_pretrained(folder, dtype=engine.loaded.dtype).eval()
            chunks = [PendingChunk("", text, tuple(engine.token_ids(text))) for text in passages]
            bare_seconds(plain, chunks[:8])
            tokens = sum(len(chunk.token_ids) for chunk in chunks)
            bare.append(tokens / bare_seconds(plain, chunks))
            report = engine.build_kv_cache(passages, progress=False)
            fused.append(report.tokens_per_s)
    result = {
        "environment": environment(),
        "dtype": engine.dtype,
        "chunks": len(passages),
        "tokens": tokens,
        "bytes_written": report.bytes_written,
        "ingest_tokens_per_s": fused,
        "bare_tokens_per_s": bare,
        "ratio": statistics.median(fused) / statistics.median(bare),
    }
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
