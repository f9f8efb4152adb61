"""The store as engines use it: loading, writing, hits in memory, and an index of a million rows.

    python benchmarks/store.py --rows-dir ./rows

Load: a 512-token chunk of the shape of SmolLM2-135M and of Qwen2.5-7B, from its file or from the memory tier into a
request's cache (:mod:`store_loads`). Put: against ``write`` and ``fsync`` of the same bytes. Get: a chunk that is in
memory, opened and read. Index: a store of a million chunks without their files, opened in a process of its own. Bounds:
put at most 1.25 of write+fsync, get under 200 microseconds, 20 chunks of a million found in under 2 ms with less than
200 MB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from environment import environment, peak_rss_bytes, reset_peak_rss
from store_loads import IDENTITY, SMALL, chunk_of, loads_by_shape, median_ms, text_of, timed

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.prompt.texthash import content_hash
from fused_kv_llm.store import KVStore


def put(folder: Path, count: int = 40) -> dict[str, Any]:
    """Measure put against write and fsync of the same bytes, in turns."""
    plain: list[float] = []
    stored: list[float] = []
    with KVStore(folder) as store:
        for number in range(1000, 1000 + count):
            key, text, kv = chunk_of(number)
            content = content_hash(text)
            stored.append(timed(lambda: store.put(key, IDENTITY, text, content, kv)))  # noqa: B023
            raw = (store.kv_dir / "chunks" / key[:2] / f"{key}.safetensors").read_bytes()
            plain.append(timed(lambda: write_and_sync(folder / f"plain{number}", raw)))  # noqa: B023
    return {"put_ms": median_ms(stored), "write_fsync_ms": median_ms(plain),
            "put_over_write_fsync": statistics.median(stored) / statistics.median(plain)}  # fmt: skip


def write_and_sync(path: Path, raw: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb", buffering=0) as file:
        file.write(raw)
        os.fsync(file.fileno())


def get(folder: Path, count: int = 2000) -> dict[str, float]:
    """Measure a hit in memory, and the opening of a file whose header was read before."""
    key, text, kv = chunk_of(0)
    with KVStore(folder) as store, KVStore(folder, memory_bytes=0) as diskonly:
        store.put(key, IDENTITY, text, content_hash(text), kv)

        def hit() -> None:
            with store.open(key, kv.token_ids) as stored:  # type: ignore[union-attr]
                stored.read_layers(0, SMALL.layers)

        def opening() -> None:
            with diskonly.open(key, kv.token_ids):  # type: ignore[union-attr]
                pass

        hit()
        opening()
        memory = sorted(timed(hit) * 1e6 for _ in range(count))
        disk = sorted(timed(opening) * 1e6 for _ in range(count))
        store.counters()
    return {"memory_hit_us": statistics.median(memory), "memory_hit_p99_us": memory[count * 99 // 100],
            "open_file_us": statistics.median(disk)}  # fmt: skip


def fill_rows(folder: Path, rows: int) -> None:
    """Make a store with rows and no files, as fast as SQLite takes them."""
    with KVStore(folder, memory_bytes=0) as store:
        database = store._parts.index._database
        with database.transaction(), database.connection() as connection:
            ids = np.arange(32, dtype="<i4")
            for start in range(0, rows, 10_000):
                batch = range(start, min(rows, start + 10_000))
                keys = [hashlib.sha256(str(n).encode()).hexdigest() for n in batch]
                hashes = [content_hash(text_of(n)) for n in batch]
                signed = [[h - (1 << 64) if h >= 1 << 63 else h for h in (c.prefix, c.full)] for c in hashes]
                connection.executemany(
                    "INSERT INTO chunks (key, identity, position, nbytes, num_tokens, prefix_hash, full_hash, length, "
                    "text, token_ids) VALUES (?, ?, 0, 700000, 32, ?, ?, ?, ?, ?)",
                    [(k, IDENTITY, *s, c.length, text_of(n).encode(), (ids + n).tobytes())
                     for n, k, s, c in zip(batch, keys, signed, hashes, strict=True)],
                )  # fmt: skip
                connection.executemany(
                    "INSERT INTO places VALUES (?, 1, 0, 700000, 32.0, 1, 1.0, 0.0, 0.0)", [(k,) for k in keys]
                )


def lookup(folder: Path, rows: int) -> dict[str, float]:
    """Look for 20 chunks at a time, by key and by text; memory on top of what the libraries take."""
    rng = np.random.default_rng(3)
    picks = [[int(n) for n in rng.integers(0, rows, 20)] for _ in range(50)]
    before = reset_peak_rss()
    with KVStore(folder, memory_bytes=0) as store:
        keys = [[hashlib.sha256(str(n).encode()).hexdigest() for n in pick] for pick in picks]
        by_key = [timed(lambda k=k: store.rows(k)) for k in keys]
        index_bytes = peak_rss_bytes() - before
        catalog = ChunkCatalog(store, IDENTITY)
        loading_s = timed(lambda: catalog.rows_of([text_of(0)]))
        catalog_peak = peak_rss_bytes() - before
        by_text = [timed(lambda p=p: catalog.rows_of([text_of(n) for n in p])) for p in picks]
        if any(len(store.rows(k)) != len(set(k)) for k in keys) or len(catalog.rows_of([text_of(5)])) != 1:
            raise SystemExit("the index does not find its rows")
        after = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") - before
    return {
        "by_key_first_ms": by_key[0] * 1e3, "by_key_ms": median_ms(by_key[1:]), "index_mb": index_bytes / 1e6,
        "by_text_ms": median_ms(by_text), "content_index_loading_s": loading_s,
        "content_index_mb": after / 1e6, "content_index_peak_mb": catalog_peak / 1e6,
    }  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rows-dir", type=Path, default=None, help="keeps the store of rows between runs")
    parser.add_argument("--only", choices=("load", "rows", "lookup"), help="one part, printed and not kept")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "store_cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fused-kv-store-") as scratch:
        rows_dir = args.rows_dir or Path(scratch) / "rows"
        if args.only == "load":
            print(json.dumps(loads_by_shape(Path(scratch)), indent=1))
            return
        if args.only == "lookup":
            print(json.dumps(lookup(rows_dir, args.rows)))
            return
        if not (rows_dir / "index.sqlite").exists():
            fill_rows(rows_dir, args.rows)
        if args.only == "rows":
            return
        again = [sys.executable, __file__, "--only", "lookup", "--rows", str(args.rows), "--rows-dir", str(rows_dir)]
        result = {
            "environment": environment(),
            "load": loads_by_shape(Path(scratch)),
            "put": put(Path(scratch) / "put"),
            "get": get(Path(scratch) / "get"),
            "index": {"rows": args.rows, **json.loads(subprocess.check_output(again))},
        }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
