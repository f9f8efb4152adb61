"""Two Ray actors ingest a corpus into shared stores: is every object that of one process, also if an actor is killed?

    python benchmarks/ray_ingestion.py --data CORPUS.jsonl [--passages 96] [--stores s3 redis] [--passes 2]

A line of the corpus is an object with a `text`. One process ingests it into a folder; then two actors of one core each
ingest it into moto's S3 server, where an actor is killed with SIGKILL in the first pass, and into a Redis server, where
one is killed in the second pass (with `--passes 1` in the first). Every object is compared with the file of the one
process, byte by byte, by SHA-256. All compute with one thread, the same batches and SmolLM2-135M.

Times are of a machine that does other things too: they say nothing about how fast Ray is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from environment import environment
from mortal_pool import mortal

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.scale import ActorResources, build_kv_cache_distributed, ingestion
from fused_kv_llm.store.remote import open_remote

RESULT = Path(__file__).parent / "results" / "ray_ingestion_cpu.json"
MODEL = "smollm2-135m"
KILLED_AFTER = 2
_ATTEMPTS = 8


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a server, and yield the URL of a store on it and what else opens it."""
    port = free_port()
    if kind == "redis":
        program = shutil.which("redis-server") or sys.exit("redis-server is not installed (Debian: redis-server)")
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        url, options = f"redis://127.0.0.1:{port}/0", {}
    else:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        keys = {"key": "test", "secret": "test"}
        url, options = "s3://corpus/kv", {**keys, "endpoint_url": f"http://127.0.0.1:{port}"}
    # moto keeps objects in memory up to this size, larger ones on the disk.
    surroundings = {**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "65536", "TMPDIR": str(folder)}
    process = subprocess.Popen(command, env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    sys.exit(f"{command[0]} did not start")
                time.sleep(0.1)
        yield url, options
    finally:
        process.kill()
        process.wait()


def start_ray() -> Any:
    """Start Ray on two cores; on a machine that is busy it gives up early, so it is tried again."""
    import ray

    for _ in range(_ATTEMPTS):
        try:
            ray.init(num_cpus=2, object_store_memory=500_000_000, include_dashboard=False, logging_level="ERROR")
            return ray
        except Exception as error:  # what Ray raises is a plain exception
            print(f"Ray did not start: {error}", flush=True)
            ray.shutdown()
    sys.exit("Ray does not start")


def by_one_process(texts: list[str], folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Ingest in this process; return what it said and the digests of its files."""
    started = time.perf_counter()
    with FusedKVEngine(MODEL, kv_dir=folder, **options) as engine:
        report = engine.build_kv_cache(texts, preprocess="wait")
    files = [*folder.glob("chunks/*/*.safetensors")]
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    nbytes = sum(file.stat().st_size for file in files)
    return {
        "chunks": report.chunks_new,
        "tokens": report.tokens,
        "seconds": time.perf_counter() - started,
        "digests": digests,
        "nbytes": nbytes,
    }


def by_actors(
    kind: str, texts: list[str], folder: Path, options: dict[str, Any], want: dict[str, str]
) -> dict[str, Any]:
    """Ingest by two actors into a server of its own, and compare every object."""
    method = "prefill" if kind == "s3" or options["preprocessing"] == "none" else "preprocess"
    (folder / kind).mkdir()
    with server(kind, folder / kind) as (url, backend):
        started = time.perf_counter()
        with mock.patch.object(ingestion, "ActorPool", mortal(method, KILLED_AFTER)):
            report = build_kv_cache_distributed(
                texts, MODEL, url, actors=ActorResources(2), kv_dir=folder / f"{kind}-local", store_options=backend,
                **options,
            )  # fmt: skip
        seconds = time.perf_counter() - started
        remote = open_remote(url, backend)
        found = {}
        for name in remote.sizes():
            found[name] = hashlib.sha256(remote.get([name])[name]).hexdigest()
        row = {
            "store": kind,
            "killed_in": method,
            "objects": len(found),
            "identical": sum(want.get(name) == digest for name, digest in found.items()),
            "lost": len(want.keys() - found.keys()),
            "more": len(found.keys() - want.keys()),
            "different": sorted(name for name, digest in found.items() if want.get(name, digest) != digest),
            "chunks_new": report.chunks_new,
            "chunks_preprocessed": report.chunks_preprocessed,
            "chunks_pending": report.chunks_pending,
            "actors_replaced": report.actors_replaced,
            "batches_retried": report.batches_retried,
            "seconds": seconds,
        }
        if kind == "redis":
            row["writes"] = remote._client.info("commandstats")["cmdstat_set"]["calls"]  # type: ignore[attr-defined]
    shutil.rmtree(folder / f"{kind}-local")
    return row


def main() -> None:
    """Run it, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--passages", type=int, help="only so many")
    parser.add_argument("--stores", nargs="+", default=["s3", "redis"], choices=["s3", "redis"])
    parser.add_argument("--passes", type=int, default=2, choices=[1, 2])
    parser.add_argument("--kept", type=Path, help="a folder that keeps what the one process has made, for another run")
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args()
    texts = [json.loads(line)["text"] for line in asked.data.read_text().splitlines()][: asked.passages]
    options = {"batch_tokens": 2048, "preprocessing": "similar" if asked.passes == 2 else "none"}
    # Ray gives its workers one thread for each core that they ask for.
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = asked.kept or folder
        known_one = kept / f"one-{asked.data.stem}-{len(texts)}-{asked.passes}.json"
        if not known_one.exists():
            known_one.write_text(json.dumps(by_one_process(texts, folder / "one", options)))
            shutil.rmtree(folder / "one")
        one = json.loads(known_one.read_text())
        digests = one["digests"]
        rows, ray = [], start_ray()
        for kind in asked.stores:
            rows.append(by_actors(kind, texts, folder, options, digests))
            print(json.dumps(rows[-1]), flush=True)
        ray.shutdown()
    run = {
        "data": asked.data.name,
        "passages": len(texts),
        "passes": asked.passes,
        "chunks": one["chunks"],
        "tokens": one["tokens"],
        "files": len(digests),
        "bytes": one["nbytes"],
        "one_process_seconds": one["seconds"],
        "two_actors": rows,
        "environment": environment(),
    }
    known = json.loads(asked.result.read_text())["runs"] if asked.result.exists() else []
    same = ("data", "passages", "passes")
    others = [old for old in known if any(old[field] != run[field] for field in same)]
    asked.result.write_text(json.dumps({"runs": [*others, run]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
