"""Memory of one request: reads a prompt from standard input, prints JSON; used by ttft.py in a fresh process."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from environment import peak_rss_bytes, reset_peak_rss

from fused_kv_llm import FusedKVEngine


def main() -> None:
    """Answer the prompt once, chunks from disk, and compare the peak with what was resident before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-dir", type=Path, required=True)
    parser.add_argument("--dtype", default=None)
    args = parser.parse_args()
    prompt = sys.stdin.read()
    with FusedKVEngine(args.model, kv_dir=args.kv_dir, dtype=args.dtype, prefix_cache_bytes=0) as engine:
        # Work space that libraries keep from their first use (tokenizer caches, matrix products) is not the request's.
        engine.encode(prompt)
        engine.generate("Hello", max_tokens=2)
        before = reset_peak_rss()
        report = engine.generate(prompt, max_tokens=1).report
        extra = peak_rss_bytes() - before
        kv = report.prompt_tokens * engine.loaded.geometry.kv_bytes_per_token(engine.loaded.dtype)
    print(json.dumps({"resident_before_bytes": before, "kv_bytes": kv, "extra_bytes": extra, "times_kv": extra / kv}))


if __name__ == "__main__":
    main()
