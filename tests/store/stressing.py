"""Several processes that do everything at once on one store; run as a program by test_stress.py.

Arguments: the folder, the remote tier's folder, the number of processes, seconds. They are forked from one that has
everything imported. Two thirds of the chunks are never deleted by
anybody: whatever was put of those must be there in the end. Prints one line of JSON a process.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from conftest import Chunk, build_chunk

from fused_kv_llm.errors import FusedKVWarning, StoreFullError, StoreUnavailableError
from fused_kv_llm.store import KVStore

CHUNKS = [build_chunk(number, tokens=4 + number % 13) for number in range(48)]
KEPT = CHUNKS[:32]
BUDGET = 120_000
NAME = "anchors-0.1"


def verify(chunk: Chunk, keys: torch.Tensor, values: torch.Tensor) -> None:
    if not (keys.equal(chunk.kv.keys) and values.equal(chunk.kv.values)):
        raise SystemExit(f"chunk {chunk.key} is wrong")


def read(store: KVStore, chunk: Chunk, rng: random.Random) -> bool:
    """Read a chunk in one of the ways there are; False if it is a miss."""
    stored = chunk.open(store)
    if stored is None:
        return False
    with stored:
        way = rng.random()
        if way < 0.3:
            verify(chunk, *stored.read_layers(0, 3))
        elif way < 0.6:
            layers = stored.read_stored(0, 3)
            verify(chunk, layers.keys, layers.values)
        else:
            for layer in rng.sample(range(3), 3):
                keys, values = stored.read_layers(layer, layer + 1)
                if not (keys[0].equal(chunk.kv.keys[layer]) and values[0].equal(chunk.kv.values[layer])):
                    raise SystemExit(f"layer {layer} of chunk {chunk.key} is wrong")
    return True


def read_sidecar(store: KVStore, chunk: Chunk, rng: random.Random) -> None:
    """Read a chunk's sidecar, if there is one: all at once, or some rows at a time."""
    ids = list(chunk.kv.token_ids)
    if rng.random() < 0.5:
        found = store.sidecars.read(chunk.key, NAME)
        right = found is None or found["x"].tolist() == ids
    else:
        rows = store.sidecars.open(chunk.key, NAME)
        middle = len(ids) // 2
        spans = [] if rows is None else [rows.read(0, middle)["x"], rows.read(middle, len(ids))["x"]]
        right = rows is None or torch.cat(spans).tolist() == ids
        if rows is not None:
            rows.close()
    if not right:
        raise SystemExit(f"the sidecar of {chunk.key} is wrong")


def step(store: KVStore, rng: random.Random, put: set[str], counts: dict[str, int]) -> None:
    """Do one thing."""
    chunk, turn = rng.choice(CHUNKS), rng.random()
    what = "read"
    if turn < 0.25:
        what = "put"
        chunk.put(store)
        put.add(chunk.key)
    elif turn < 0.30:
        what = "side"
        if store.contains([chunk.key]) and chunk in KEPT:
            store.sidecars.put(chunk.key, NAME, {"x": torch.tensor(chunk.kv.token_ids)}, by_rows=True)
    elif turn < 0.40:
        what = "read side"
        read_sidecar(store, chunk, rng)
    elif turn < 0.44:
        what = "delete"
        store.delete([rng.choice(CHUNKS[len(KEPT) :]).key])
    elif turn < 0.48:
        what = "prefetch"
        store.prefetch([c.key for c in rng.sample(CHUNKS, 8)], sidecars=[NAME])
    elif turn < 0.50:
        what = "evict"
        store.evict(BUDGET // 2)
    elif turn < 0.51:
        what = "check"
        store.check()
        store.stats()
    elif not read(store, chunk, rng):
        what = "miss"
    counts[what] = counts.get(what, 0) + 1


def work(kv_dir: Path, remote: str, seconds: float, seed: int) -> None:
    """Work until the time is over; a crash of any kind ends the process with an error."""
    noted: list[str] = []
    warnings.simplefilter("always", FusedKVWarning)
    warnings.showwarning = lambda message, *_, **__: noted.append(str(message))
    rng = random.Random(seed)
    memory_bytes = 40_000 if seed % 3 else 0
    put: set[str] = set()
    counts: dict[str, int] = {}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        # Opened again and again: what is in memory must not hide what is on the disk.
        with KVStore(kv_dir, remote=f"file://{remote}", disk_bytes=BUDGET, memory_bytes=memory_bytes) as store:
            reopen = time.monotonic() + 5
            while time.monotonic() < min(reopen, deadline):
                try:
                    step(store, rng, put, counts)
                except (StoreFullError, StoreUnavailableError):
                    # All that could make room is being read by the others, or the others evict what is brought.
                    counts["full"] = counts.get("full", 0) + 1
        # Only a store that is closed has no thread any more that brings chunks, and may miss one.
        for name in ("damaged", "promoted", "demoted"):
            counts[name] = counts.get(name, 0) + getattr(store.counters(), name)
    kept = sorted(put & {chunk.key for chunk in KEPT})
    # One call, so that lines of several processes do not mix.
    os.write(1, json.dumps({"counts": counts, "put": kept, "noted": noted}).encode() + b"\n")


def main() -> None:
    """Fork the processes and wait for them."""
    kv_dir, remote, processes, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    children = []
    for seed in range(processes):
        child = os.fork()
        if child == 0:
            code = 3
            try:
                work(kv_dir, remote, seconds, seed)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    main()
