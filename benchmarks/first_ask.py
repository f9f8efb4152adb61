"""How long after ``fused-kv ingest FOLDER`` the files can be asked about, against a bare batched forward of them.

    python benchmarks/first_ask.py --folder docs

Both are whole processes, in turns. "ingest" runs until the command says that the passages can be asked about: start,
reading the files, their plain KV in the store, and their embeddings. "bare" starts plain transformers, reads the same
files into the same passages, and runs one forward over length-sorted, padded batches of them; nothing is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment

READY = "can be asked about"


def bare(folder: Path) -> None:
    """Load plain transformers, run the forward, and print its seconds as JSON."""
    import torch
    from ingestion import bare_seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fused_kv_llm.demo import read_passages
    from fused_kv_llm.model.embedded import embedded_model_folder
    from fused_kv_llm.model.loading import choose_dtype
    from fused_kv_llm.offline.batches import PendingChunk

    weights = embedded_model_folder("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(weights)
    dtype, _ = choose_dtype(None, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=dtype).eval()
    texts = [passage.text for passage in read_passages([folder])]
    chunks = [PendingChunk("", text, tuple(tokenizer(text).input_ids)) for text in texts]
    seconds = bare_seconds(model, chunks)
    print(json.dumps({"forward_s": seconds, "chunks": len(chunks), "tokens": sum(len(c.token_ids) for c in chunks)}))


def run_bare(folder: Path) -> dict[str, Any]:
    """Run :func:`bare` in a process of its own."""
    started = time.perf_counter()
    command = [sys.executable, __file__, "--folder", str(folder), "--bare"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "whole_s": time.perf_counter() - started}


def run_ingest(folder: Path) -> dict[str, float]:
    """Run ``fused-kv ingest`` until the files can be asked about; return seconds from its start to each line."""
    command = [sys.executable, "-c", "from fused_kv_llm.cli import app; app()", "ingest", str(folder)]
    lines: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as kv_dir:
        started = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--kv-dir", kv_dir],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        for line in process.stdout or ():
            lines[line.strip()[:60]] = time.perf_counter() - started
            if READY in line:
                break
        process.terminate()
        process.communicate()
    return lines


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first_ask_cpu.json")
    args = parser.parse_args()
    if args.bare:
        bare(args.folder)
        return
    bare_runs, ingest_runs = [], []
    for _ in range(args.repeats):
        bare_runs.append(run_bare(args.folder))
        ingest_runs.append(run_ingest(args.folder))
    whole_s = statistics.median(run["whole_s"] for run in bare_runs)
    askable_s = statistics.median(max(lines.values()) for lines in ingest_runs)
    result = {
        "environment": environment(),
        "files": len([path for path in args.folder.rglob("*") if path.suffix in (".md", ".txt")]),
        "chunks": bare_runs[0]["chunks"],
        "tokens": bare_runs[0]["tokens"],
        "bare_whole_s": whole_s,
        "askable_s": askable_s,
        "times_bare": askable_s / whole_s,
        "bare_runs": bare_runs,
        "ingest_runs": ingest_runs,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
