"""Threads and processes on one folder."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fused_kv_llm.store import KVStore

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")

PROCESS = """
import sys
sys.path[:0] = sys.argv[2:]
from conftest import put_and_check
print("ready", flush=True)
sys.stdin.readline()
print(*put_and_check(sys.argv[1]), flush=True)
"""


def files(kv_dir: Path) -> list[Path]:
    return [path for path in kv_dir.rglob("*") if path.is_file() and not path.name.startswith("index.sqlite")]


def test_two_threads_put_the_same_chunk(store, kv_dir, make_chunk):
    for seed in range(10):
        chunk = make_chunk(seed)
        barrier = threading.Barrier(2)

        def put(chunk=chunk, barrier=barrier):
            barrier.wait(10)
            return chunk.put(store)

        with ThreadPoolExecutor(2) as pool:
            written = sorted(future.result() for future in [pool.submit(put), pool.submit(put)])
        assert written == [0, chunk.path(kv_dir).stat().st_size]
    assert len(files(kv_dir)) == 10


def test_two_processes_put_the_same_chunks(kv_dir, make_chunk, put_and_check):
    paths = [str(Path(__file__).parent), *sys.path]
    with subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(kv_dir), *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        # The creation of the folder and of the index is part of the race.
        process.stdin.write("go\n")
        process.stdin.flush()
        mine = put_and_check(kv_dir)
        theirs = [int(n) for n in process.communicate(timeout=60)[0].split()]
        assert process.returncode == 0
    sizes = [make_chunk(seed).path(kv_dir).stat().st_size for seed in range(len(mine))]
    assert [sorted(pair) for pair in zip(mine, theirs, strict=True)] == [[0, size] for size in sizes]
    assert len(files(kv_dir)) == len(mine)
    with KVStore(kv_dir) as store:
        assert store.stats().chunks == len(mine)


def test_stores_on_one_folder_race_to_create_it(tmp_path):
    for attempt in range(5):
        barrier = threading.Barrier(6)

        def open_and_close(attempt=attempt, barrier=barrier):
            barrier.wait(10)
            KVStore(tmp_path / str(attempt)).close()

        with ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(open_and_close) for _ in range(6)]:
                future.result()


def test_threads_do_everything_at_once(kv_dir, make_chunk):
    chunks = [make_chunk(seed) for seed in range(12)]
    with KVStore(kv_dir, memory_bytes=4 * chunks[0].kv.nbytes) as store:

        def work(turn: int) -> int:
            chunk = chunks[(turn * 7) % 12]
            if turn % 11 == 0:
                store.delete([chunk.key])
            chunk.put(store)
            if turn % 5 == 0:
                store.prefetch([c.key for c in chunks])
            stored = chunk.open(store)
            if stored is None:
                return 0
            with stored:
                keys, values = stored.read_layers(0, 3)
            assert keys.equal(chunk.kv.keys)
            assert values.equal(chunk.kv.values)
            assert store.stats().memory_bytes <= 4 * chunk.kv.nbytes
            return 1

        with ThreadPoolExecutor(6) as pool:
            hits = sum(pool.map(work, range(240)))
    assert hits > 150
