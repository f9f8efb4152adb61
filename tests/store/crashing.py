"""A writer that is killed with SIGKILL again and again; run as a program by test_crash.py.

Every child is forked from a process that has everything imported, works on the store, and is killed after a random
time or at a random system call. What it had finished before must be there afterwards, everything that is there must
be whole, and whatever else is left must be mendable.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from conftest import Chunk, build_chunk

from fused_kv_llm.store import KVStore

CALLS = ("open", "write", "fsync", "replace", "unlink", "close")


def die_at(number: int) -> None:
    """Let the process die at its ``number``-th system call that changes files, before or after it."""
    left = [number]

    def deadly(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] == 0 and number % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **kwargs)
            finally:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))


def work(kv_dir: Path, chunks: list[Chunk], rng: random.Random, report: int) -> None:
    """Put, read, delete and evict without end, reporting every chunk that was put completely."""
    with KVStore(kv_dir, disk_bytes=chunks[0].kv.nbytes * 30) as store:
        while True:
            chunk = rng.choice(chunks)
            turn = rng.random()
            if turn < 0.75:
                chunk.put(store)
                os.write(report, f"+{chunk.key}\n".encode())
            elif turn < 0.85:
                os.write(report, f"-{chunk.key}\n".encode())
                store.delete([chunk.key])
            elif (stored := chunk.open(store)) is not None:
                with stored:
                    stored.read_layers(0, stored.num_layers)


def round_of(kv_dir: Path, chunks: list[Chunk], rng: random.Random, *, by_call: bool) -> set[str]:
    """Let one child work and die; return the keys it certainly put and did not delete since."""
    log = kv_dir.parent / "log"
    log.write_bytes(b"")
    child = os.fork()
    if child == 0:
        try:
            report = os.open(log, os.O_WRONLY | os.O_APPEND)
            if by_call:
                die_at(rng.randrange(1, 120))
            work(kv_dir, chunks, rng, report)
        finally:
            os._exit(3)
    if not by_call:
        time.sleep(rng.random() * 0.04)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit(f"the writer ended by itself: {status}")
    alive: set[str] = set()
    for line in log.read_text().splitlines():
        (alive.add if line[0] == "+" else alive.discard)(line[1:])
    return alive


def main() -> None:
    """Kill, audit, repeat; print how often, what was found, and how many chunks were verified."""
    kv_dir, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    chunks = [build_chunk(number, tokens=20) for number in range(24)]
    by_key = {chunk.key: chunk for chunk in chunks}
    found: dict[str, int] = {}
    verified = 0
    for number in range(kills):
        alive = round_of(kv_dir, chunks, random.Random(rng.random()), by_call=number % 2 == 0)
        with KVStore(kv_dir) as store:
            for key in alive - store.contains(alive):
                raise SystemExit(f"chunk {key} was put and is lost")
            report = store.check(fix=True)
            for kind, count in report.by_kind.items():
                found[kind] = found.get(kind, 0) + count
            if store.check().findings:
                raise SystemExit(f"not mended: {store.check().findings}")
            for key in store.contains(by_key):
                with by_key[key].open(store) as stored:
                    keys, values = stored.read_layers(0, 3)
                if not (keys.equal(by_key[key].kv.keys) and values.equal(by_key[key].kv.values)):
                    raise SystemExit(f"chunk {key} is wrong")
                verified += 1
    print(kills, verified, json.dumps(found))


if __name__ == "__main__":
    main()
