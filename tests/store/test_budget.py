"""The disk budget, enforced while writing; what is being read stays."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fused_kv_llm.config import parse_bytes
from fused_kv_llm.errors import ConfigError, StoreFullError
from fused_kv_llm.store import KVStore

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


@pytest.fixture
def chunks(make_chunk):
    return [make_chunk(seed) for seed in range(12)]


@pytest.fixture
def nbytes(tmp_path, chunks):
    with KVStore(tmp_path / "sizes") as store:
        return max(chunk.put(store) for chunk in chunks)


def taken(kv_dir: Path) -> int:
    return sum(path.stat().st_size for path in (kv_dir / "chunks").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("20GB", 20 * 10**9), ("20 GiB", 20 * 2**30), ("1.5tb", 1.5e12), ("512", 512), (0, 0), ("0", 0), ("3k", 3000)],
)
def test_sizes_that_people_write(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("size", ["much", "-1", -1, "1XB", "20iB", 1.5, True, None, ""])
def test_sizes_that_are_none(kv_dir, size):
    with pytest.raises(ConfigError, match="memory_bytes"):
        KVStore(kv_dir, memory_bytes=size)
    assert not kv_dir.exists()


def test_never_more_than_the_budget(kv_dir, chunks, nbytes):
    with KVStore(kv_dir, disk_bytes=4 * nbytes) as store:
        for chunk in chunks:
            chunk.put(store)
            store.sidecars.put(chunk.key, "anchors", {"x": torch.zeros(3)})
            assert taken(kv_dir) <= 4 * nbytes
            assert taken(kv_dir) == store.stats().tiers["disk"][1]
        assert store.contains([chunks[-1].key])
        assert store.check().findings == []
    # Sidecars go with their chunk.
    names = [path.name for path in (kv_dir / "chunks").rglob("*.safetensors")]
    assert len([name for name in names if ".anchors." in name]) * 2 == len(names)


def test_a_chunk_larger_than_the_budget(kv_dir, chunks, nbytes):
    with KVStore(kv_dir, disk_bytes=nbytes // 2) as store:
        with pytest.raises(StoreFullError, match="Raise it"):
            chunks[0].put(store)
        assert store.stats().chunks == 0
        assert taken(kv_dir) == 0


def test_what_is_being_read_stays(kv_dir, chunks, nbytes):
    """In this process and, the lock being the file's, in any other."""
    with KVStore(kv_dir, memory_bytes=0) as reading, KVStore(kv_dir, disk_bytes=3 * nbytes) as writing:
        for chunk in chunks[:3]:
            chunk.put(writing)
        held = [chunk.open(reading) for chunk in chunks[:2]]
        for chunk in chunks[3:8]:
            chunk.put(writing)
        assert writing.contains(c.key for c in chunks[:2]) == {c.key for c in chunks[:2]}
        with chunks[7].open(reading), pytest.raises(StoreFullError, match="are being read"):
            chunks[8].put(writing)
        for chunk, stored in zip(chunks, held, strict=False):
            assert stored.read_layers(0, 3)[0].equal(chunk.kv.keys)
            stored.close()
        assert chunks[8].put(writing) > 0
        assert writing.evict(0) == 3


READER = """
import sys
sys.path[:0] = sys.argv[2:]
from conftest import build_chunk
from fused_kv_llm.store import KVStore
store = KVStore(sys.argv[1], memory_bytes=0, read_only=True)
chunk = build_chunk(0)
stored = chunk.open(store)
print("open", flush=True)
sys.stdin.readline()
print(stored.read_layers(0, 3)[0].equal(chunk.kv.keys), flush=True)
"""


def test_what_another_process_reads_stays(kv_dir, chunks):
    with KVStore(kv_dir) as store:
        for chunk in chunks[:3]:
            chunk.put(store)
        paths = [str(Path(__file__).parent), *sys.path]
        with subprocess.Popen(
            [sys.executable, "-c", READER, str(kv_dir), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout.readline() == "open\n"
            with pytest.raises(StoreFullError, match="room: 1 are being read"):
                store.evict(0)
            assert store.contains(c.key for c in chunks[:3]) == {chunks[0].key}
            assert process.communicate("go\n", timeout=60)[0] == "True\n"
        assert store.evict(0) == 1


def test_file_that_vanishes_under_a_reader_is_a_miss(kv_dir, chunks):
    with KVStore(kv_dir, memory_bytes=0) as one, KVStore(kv_dir) as other:
        chunks[0].put(other)
        assert other.evict(0) == 1
        assert chunks[0].open(one) is None
        assert one.counters().misses == 1


def test_threads_share_a_budget(kv_dir, chunks, nbytes):
    with KVStore(kv_dir, disk_bytes=5 * nbytes) as store, ThreadPoolExecutor(6) as pool:

        def work(turn):
            chunk = chunks[(turn * 5) % 12]
            chunk.put(store)
            assert store.stats().tiers["disk"][1] <= 5 * nbytes
            stored = chunk.open(store)
            if stored is not None:
                with stored:
                    assert stored.read_layers(0, 3)[1].equal(chunk.kv.values)

        list(pool.map(work, range(120)))
        assert taken(kv_dir) <= 5 * nbytes
        assert store.check().findings == []


def test_opening_with_a_smaller_budget_makes_room_when_writing(kv_dir, chunks, nbytes):
    with KVStore(kv_dir) as store:
        for chunk in chunks[:6]:
            chunk.put(store)
    with KVStore(kv_dir, disk_bytes=2 * nbytes) as store:
        assert store.stats().chunks == 6
        chunks[7].put(store)
        assert taken(kv_dir) <= 2 * nbytes
        assert store.free_bytes() <= min(2 * nbytes, os.statvfs(kv_dir).f_bavail * 10**9)


def test_a_chunk_does_not_make_room_for_its_own_side_file(kv_dir, chunks, nbytes):
    with KVStore(kv_dir, disk_bytes=3 * nbytes, memory_bytes=0) as store:
        for chunk in chunks[:3]:
            chunk.put(store)
        cheap = chunks[3]
        cheap.put(store)
        for chunk in chunks[:3] * 5:
            if stored := chunk.open(store):
                stored.close()
        # The others were used, so it is worth least.
        assert store.sidecars.put(cheap.key, "x", {"x": torch.zeros(nbytes // 2, dtype=torch.uint8)}) > nbytes // 2
        assert store.contains([cheap.key]) == {cheap.key}
        assert store.sidecars.has(cheap.key, "x")
        assert taken(kv_dir) == store.stats().tiers["disk"][1] <= 3 * nbytes
