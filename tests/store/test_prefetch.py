"""Chunks are loaded in the background, requests join in, nothing outlives ``close``."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.folder import StoreFolder
from fused_kv_llm.store.format import file_name

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("fused-kv-prefetch")]


@pytest.fixture
def gate(monkeypatch):
    """Data reads wait until the gate is opened."""
    opened, reached = threading.Event(), threading.Event()
    preadv = os.preadv

    def gated(fd, buffers, offset):
        reached.set()
        assert opened.wait(10)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", gated)
    opened.reached = reached
    yield opened
    opened.set()


def test_prefetch_fills_the_memory_tier(store, make_chunk):
    chunks = [make_chunk(seed) for seed in range(4)]
    for chunk in chunks:
        chunk.put(store)
    store.prefetch(chunk.key for chunk in chunks)
    wait_until(lambda: store.stats().memory_chunks == 4)
    for chunk in chunks:
        with chunk.open(store) as stored:
            assert stored.tier == "memory"
            assert torch.equal(stored.read_layers(0, 3)[1], chunk.kv.values)


def test_prefetch_returns_at_once_and_close_joins(kv_dir, make_chunk, gate):
    chunk = make_chunk()
    store = KVStore(kv_dir)
    chunk.put(store)
    others = prefetch_threads()
    store.prefetch([chunk.key])
    assert gate.reached.wait(10)
    assert store.stats().memory_chunks == 0
    assert len(prefetch_threads()) == len(others) + 1
    threading.Timer(0.05, gate.set).start()
    store.close()
    assert prefetch_threads() == others


def test_close_drops_what_is_queued(kv_dir, make_chunk, gate):
    chunks = [make_chunk(seed) for seed in range(3)]
    store = KVStore(kv_dir)
    for chunk in chunks:
        chunk.put(store)
        store.prefetch([chunk.key])
    assert gate.reached.wait(10)
    threading.Timer(0.05, gate.set).start()
    store.close()
    assert store._parts.memory.usage() == (0, 0)


def test_request_joins_a_prefetch(store, make_chunk, monkeypatch):
    chunk = make_chunk(layers=6)
    chunk.put(store)
    preadv, lock = os.preadv, threading.Lock()
    total, half_way = 0, threading.Event()

    def counting(fd, buffers, offset):
        nonlocal total
        count = preadv(fd, buffers, offset)
        with lock:
            total += count
        half_way.set()
        time.sleep(0.005)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    store.prefetch([chunk.key])
    assert half_way.wait(10)
    with chunk.open(store) as stored:
        for layer in range(6):
            keys, values = stored.read_layers(layer, layer + 1)
            assert torch.equal(keys[0], chunk.kv.keys[layer])
            assert torch.equal(values[0], chunk.kv.values[layer])
    assert total == chunk.kv.nbytes


def test_two_that_open_a_file_at_the_same_moment_read_it_together(store, make_chunk, monkeypatch):
    chunk = make_chunk()
    chunk.put(store)
    open_file, others = StoreFolder.open_file, []

    def overtaken(self, key, name=None):
        monkeypatch.setattr(StoreFolder, "open_file", open_file)
        others.append(chunk.open(store))
        return open_file(self, key, name)

    monkeypatch.setattr(StoreFolder, "open_file", overtaken)
    with chunk.open(store) as later, others[0] as earlier:
        earlier.read_layers(0, 3)
        assert store.stats().memory_chunks == 1
        assert torch.equal(later.read_layers(0, 3)[0], chunk.kv.keys)


def test_prefetch_stops_at_the_budget(kv_dir, make_chunk):
    chunks = [make_chunk(seed) for seed in range(4)]
    with KVStore(kv_dir, memory_bytes=2 * chunks[0].kv.nbytes) as store:
        for chunk in chunks:
            chunk.put(store)
        store.prefetch([chunk.key for chunk in chunks])
        wait_until(lambda: store.stats().memory_chunks == 2)
        # A second job that finds nothing ends after the first one has ended.
        store._parts.prefetcher._pool.executor().submit(lambda: None).result(10)
        assert [file_name(chunk.key) in store._parts.memory for chunk in chunks] == [True, True, False, False]


def test_prefetch_brings_the_sidecars_that_are_named(store, make_chunk):
    chunks, rows = [make_chunk(seed) for seed in range(3)], torch.arange(12.0).view(6, 2)
    for chunk in chunks:
        chunk.put(store)
        store.sidecars.put(chunk.key, "shift", {"x": rows}, by_rows=True)
        store.sidecars.put(chunk.key, "other", {"x": rows}, by_rows=True)
    store.drop_memory()
    # A chunk need not have all of them.
    store.prefetch([chunk.key for chunk in chunks], sidecars=["shift", "missing"])
    store._parts.prefetcher._pool.executor().submit(lambda: None).result(10)
    assert store.stats().memory_bytes == 3 * (chunks[0].kv.nbytes + rows.nbytes)
    for chunk in chunks:
        for name, in_memory in (("shift", True), ("other", False)):
            sidecar = store.sidecars.open(chunk.key, name)
            assert sidecar.in_memory == in_memory
            assert torch.equal(sidecar.read(2, 6)["x"], rows[2:])
            sidecar.close()


def test_a_request_joins_the_prefetch_of_a_sidecar(store, make_chunk, gate):
    chunk, rows = make_chunk(), torch.arange(12.0).view(6, 2)
    chunk.put(store)
    store.sidecars.put(chunk.key, "shift", {"x": rows}, by_rows=True)
    store.prefetch([chunk.key], sidecars=["shift"])
    assert gate.reached.wait(10)
    gate.set()
    sidecar = store.sidecars.open(chunk.key, "shift")
    assert torch.equal(sidecar.read(0, 6)["x"], rows)
    sidecar.close()
    store._parts.prefetcher._pool.executor().submit(lambda: None).result(10)
    assert store.stats().memory_bytes == chunk.kv.nbytes + rows.nbytes


def test_prefetch_without_memory_does_nothing(diskonly, make_chunk):
    chunk = make_chunk()
    chunk.put(diskonly)
    others = prefetch_threads()
    diskonly.prefetch([chunk.key])
    assert prefetch_threads() == others


def test_prefetch_leaves_damage_to_the_request(store, kv_dir, make_chunk):
    broken, missing, good = make_chunk(1), make_chunk(2), make_chunk(3)
    broken.put(store)
    good.put(store)
    os.truncate(broken.path(kv_dir), 20)
    store.prefetch([broken.key, missing.key, good.key])
    wait_until(lambda: store.stats().memory_chunks == 1)
    assert store.contains([broken.key]) == {broken.key}
    with pytest.warns(FusedKVWarning, match="header"):
        assert broken.open(store) is None
    assert good.open(store).tier == "memory"


def test_chunk_deleted_during_prefetch_does_not_come_back(store, make_chunk, gate):
    chunk = make_chunk()
    chunk.put(store)
    store.prefetch([chunk.key])
    assert gate.reached.wait(10)
    store.delete([chunk.key])
    gate.set()
    store._parts.prefetcher._pool.executor().submit(lambda: None).result(10)
    assert store.stats().memory_chunks == 0
    assert chunk.open(store) is None
