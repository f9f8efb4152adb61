"""The store against the plain calls underneath it: load, put, get, and an index of a million rows.

    python benchmarks/store.py --rows-dir ./rows

Load: a 512-token chunk of the shape of SmolLM2-135M and of Qwen2.5-7B, opened and read into a request's cache, against
``readinto`` of the same file, cached and not; the first read of a file, which is verified, and later ones stand apart.
Put: against
``write`` and ``fsync`` of the same bytes. Get: a chunk that is in memory, opened and read. Index: a store of a million
chunks without their files, opened in a process of its own. Bounds: load at least 0.9 of readinto, put at most 1.25 of
write+fsync, get under 200 microseconds, 20 chunks of a million found in under 2 ms with less than 200 MB.
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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from environment import drop_page_cache, environment, peak_rss_bytes, reset_peak_rss

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import ChunkKV, chunk_key
from fused_kv_llm.online.read_ahead import layer_groups
from fused_kv_llm.prompt.texthash import content_hash
from fused_kv_llm.store import KVStore, StoredKV, byte_view

TOKENS = 512
IDENTITY = "0" * 64


class Shape(NamedTuple):
    """What a chunk's keys and values of 512 tokens are."""

    layers: int
    kv_heads: int
    head_dim: int


SMALL = Shape(30, 3, 64)
SHAPES = {"smollm2-135m": SMALL, "qwen2.5-7b": Shape(28, 4, 128)}


def text_of(number: int) -> str:
    """Return a text of 128 characters."""
    return f"Chunk {number} of many: {hashlib.sha256(str(number).encode()).hexdigest()}".ljust(128, ".")


def chunk_of(number: int, shape: Shape = SMALL) -> tuple[str, str, ChunkKV]:
    """Return key, text and random KV of a chunk."""
    generator, (layers, heads, dim) = torch.Generator().manual_seed(number), shape
    keys, values = torch.randn((2, layers, heads, TOKENS, dim), generator=generator).to(torch.bfloat16)
    ids = tuple(range(number, number + TOKENS))
    return chunk_key(IDENTITY, ids), text_of(number), ChunkKV(keys, values, ids, 0)


def median_ms(seconds: list[float]) -> float:
    """Return the median in milliseconds."""
    return statistics.median(seconds) * 1e3


def paired_share(plain: list[float], ways: list[float], count: int) -> float:
    """Return how many times as fast the one is as the other: the median over rounds of so many calls of each."""
    rounds = range(0, len(plain), count)
    return statistics.median(median_ms(plain[i : i + count]) / median_ms(ways[i : i + count]) for i in rounds)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def copy_layers(stored: StoredKV, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Read layers and copy them to their place in a request's cache."""
    layers = stored.read_stored(start, stop)
    keys.copy_(layers.keys)
    values.copy_(layers.values)


class Loads:
    """The ways to bring a chunk's KV from its file into memory that is there already."""

    def __init__(self, folder: Path, count: int, shape: Shape) -> None:
        self.folder = folder
        self.layers = shape.layers
        self.chunks = [chunk_of(number, shape) for number in range(count)]
        with KVStore(folder) as store:
            for key, text, kv in self.chunks:
                store.put(key, IDENTITY, text, content_hash(text), kv)
        self.paths = [folder / "chunks" / key[:2] / f"{key}.safetensors" for key, _, _ in self.chunks]
        # The kernel copies to memory that begins at a multiple of 32 bytes twice as fast as to what bytearray() gives.
        self.plain = byte_view(torch.empty(self.paths[0].stat().st_size, dtype=torch.uint8))
        # A request's cache is longer than a chunk, so the chunk's place in it is not contiguous.
        self.cache = torch.zeros((2, shape.layers, shape.kv_heads, 5 * TOKENS, shape.head_dim), dtype=torch.bfloat16)
        self.places = [self.cache[:, :, :, slot * TOKENS : (slot + 1) * TOKENS].unbind() for slot in range(5)]
        self.groups = [(group.start, group.stop) for group in layer_groups(shape.layers)]
        self.parts = [tuple(part[start:stop] for part in self.places[1]) for start, stop in self.groups]
        self.known = KVStore(folder, memory_bytes=0)
        self.unknown = KVStore(folder, memory_bytes=0)
        # A memory tier that holds one chunk keeps every chunk that is read, and has none that is asked for.
        self.keeping = KVStore(folder, memory_bytes=int(1.5 * self.chunks[0][2].nbytes))

    def close(self) -> None:
        """Close the stores."""
        for store in (self.known, self.unknown, self.keeping):
            store.close()

    def begin(self) -> None:
        """Have a store that has read nothing yet."""
        self.unknown.close()
        self.unknown = KVStore(self.folder, memory_bytes=0)

    def readinto(self, number: int) -> None:
        """Read the file into a buffer."""
        with self.paths[number].open("rb", buffering=0) as file:
            view = self.plain
            while count := file.readinto(view):
                view = view[count:]

    def first_into_cache(self, number: int) -> None:
        """Have the chunk in a request's cache, every checksum verified."""
        self._copy(self.unknown, number)

    def into_cache(self, number: int) -> None:
        """The same of a file that this process has verified before."""
        self._copy(self.known, number)

    def into_cache_by_groups(self, number: int) -> None:
        """The same, in the groups of layers of an engine, which computes with the first while the next are read."""
        with self.open(self.known, number) as stored:
            for (start, stop), (keys, values) in zip(self.groups, self.parts, strict=True):
                copy_layers(stored, start, stop, keys, values)

    def into_cache_and_memory_tier(self, number: int) -> None:
        """The same, and the memory tier keeps the chunk for the next request."""
        self._copy(self.keeping, number)

    def into_memory(self, number: int) -> None:
        """Have it in memory of the store's."""
        with self.open(self.known, number) as stored:
            stored.read_stored(0, self.layers)

    def open(self, store: KVStore, number: int) -> StoredKV:
        """Open a chunk."""
        key, _, kv = self.chunks[number]
        stored = store.open(key, kv.token_ids)
        if stored is None:
            raise SystemExit(f"chunk {number} is gone")
        return stored

    def _copy(self, store: KVStore, number: int) -> None:
        with self.open(store, number) as stored:
            copy_layers(stored, 0, self.layers, *self.places[1])


def load(folder: Path, shape: Shape, count: int = 12, rounds: int = 15) -> dict[str, Any]:
    """Measure loads, cached and not; the ways take turns, each reads every file in its turn."""
    loads = Loads(folder, count, shape)
    ways = [loads.readinto, loads.into_cache, loads.first_into_cache, loads.into_cache_by_groups,
            loads.into_memory, loads.into_cache_and_memory_tier]  # fmt: skip
    found: dict[str, Any] = {
        "chunk": {**shape._asdict(), "tokens": TOKENS, "dtype": "bfloat16"},
        "file_bytes": len(loads.plain),
    }
    # Files that are new are verified every time.
    time.sleep(2.5)
    for way in ways:
        for number in range(count):
            way(number)
    for state in ("warm", "cold"):
        seconds: dict[str, list[float]] = {}
        for turn in range(rounds if state == "warm" else 3):
            shift = turn % len(ways)
            for way in ways[shift:] + ways[:shift]:
                loads.begin()
                for number in range(count):
                    if state == "cold":
                        drop_page_cache(loads.paths[number].parent)
                    seconds.setdefault(way.__name__, []).append(timed(lambda w=way, n=number: w(n)))
        medians = {name: median_ms(values) for name, values in seconds.items()}
        share = {name: paired_share(seconds["readinto"], values, count) for name, values in seconds.items()}
        found[state] = {"median_ms": medians, "share_of_readinto": share}
    found["warm_several"] = several(loads, count)
    loads.close()
    return found


def loads_by_shape(scratch: Path) -> dict[str, Any]:
    """Measure loads of chunks of a small model and of a larger one."""
    return {name: load(scratch / name, shape) for name, shape in SHAPES.items()}


def several(loads: Loads, count: int) -> dict[str, dict[str, float]]:
    """Measure four chunks at once in four threads: into the cache, and plain reads into memory that is there.

    A request opens its chunks one after the other, and its threads read them; or each thread does both.
    """
    buffers = [byte_view(torch.zeros(len(loads.plain), dtype=torch.uint8)) for _ in range(4)]

    def plain(slot: int, number: int) -> None:
        with loads.paths[number].open("rb", buffering=0) as file:
            file.readinto(buffers[slot])

    def read(slot: int, stored: StoredKV) -> None:
        with stored:
            copy_layers(stored, 0, loads.layers, *loads.places[slot])

    def open_and_read(slot: int, number: int) -> None:
        read(slot, loads.open(loads.known, number))

    ways: dict[str, Callable[[list[int]], object]] = {
        "readinto": lambda numbers: list(pool.map(plain, range(4), numbers)),
        "into_cache": lambda numbers: list(pool.map(read, range(4), [loads.open(loads.known, n) for n in numbers])),
        "opened_by_threads": lambda numbers: list(pool.map(open_and_read, range(4), numbers)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with ThreadPoolExecutor(4) as pool:
        for turn in range(3 * count):
            numbers = [(4 * turn + i) % count for i in range(4)]
            for name, way in ways.items():
                seconds[name].append(timed(lambda w=way, n=numbers: w(n)))
    medians = {name: median_ms(values) for name, values in seconds.items()}
    shares = {name: medians["readinto"] / value for name, value in medians.items()}
    return {"median_ms": medians, "share_of_readinto": shares}


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
