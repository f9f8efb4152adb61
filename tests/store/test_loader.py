"""Layers are read one by one, only once, by as many threads as like to."""

from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store import KVStore

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


@pytest.fixture
def reads(monkeypatch):
    """Every read of a file's data: its offset and its bytes."""
    made = []
    preadv = os.preadv

    def recording(fd, buffers, offset):
        count = preadv(fd, buffers, offset)
        made.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", recording)
    return made


def test_one_layer_reads_one_layer(diskonly, kv_dir, make_chunk, reads):
    chunk = make_chunk(layers=10, tokens=50)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        assert reads == []
        keys, values = stored.read_layers(4, 5)
        assert sum(count for _, count in reads) == keys.nbytes + values.nbytes == stored.nbytes // 10
        assert torch.equal(keys, chunk.kv.keys[4:5])
        assert torch.equal(values, chunk.kv.values[4:5])


def test_neighbouring_layers_are_read_together_and_once(diskonly, make_chunk, reads):
    chunk = make_chunk(layers=8)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        stored.read_layers(3, 5)
        assert len(reads) == 2
        keys, values = stored.read_layers(0, 8)
        assert len(reads) == 6
        assert sum(count for _, count in reads) == stored.nbytes
        assert torch.equal(keys, chunk.kv.keys)
        assert torch.equal(values, chunk.kv.values)
        stored.read_layers(0, 8)
        assert len(reads) == 6


def test_short_reads_are_continued(diskonly, make_chunk, monkeypatch):
    chunk = make_chunk()
    chunk.put(diskonly)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    assert torch.equal(chunk.open(diskonly).read_layers(0, 3)[0], chunk.kv.keys)


def test_bad_ranges(store, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    with chunk.open(store) as stored:
        assert stored.read_layers(1, 1)[0].shape == (0, 2, 5, 8)
        for start, stop in ((-1, 2), (0, 4), (2, 1)):
            with pytest.raises(ConfigError, match=r"inside 0\.\.3"):
                stored.read_layers(start, stop)


def test_many_threads_read_different_and_equal_layers(diskonly, make_chunk, reads):
    chunk = make_chunk(layers=16, tokens=40)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored, ThreadPoolExecutor(8) as pool:
        layers = list(range(16)) * 4
        results = list(pool.map(lambda layer: stored.read_layers(layer, layer + 1), layers))
    for layer, (keys, values) in zip(layers, results, strict=True):
        assert torch.equal(keys[0], chunk.kv.keys[layer])
        assert torch.equal(values[0], chunk.kv.values[layer])
    assert sum(count for _, count in reads) == chunk.kv.nbytes


def test_two_requests_share_one_read(diskonly, make_chunk, reads):
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    with chunk.open(diskonly) as one:
        one.read_layers(0, 2)
        with chunk.open(diskonly) as two:
            two.read_layers(0, 4)
    assert sum(count for _, count in reads) == chunk.kv.nbytes
    # Without a memory tier and without a reader nothing is kept.
    with chunk.open(diskonly) as three:
        three.read_layers(0, 4)
    assert sum(count for _, count in reads) == 2 * chunk.kv.nbytes


def test_closing_waits_for_a_read_in_flight(diskonly, make_chunk, monkeypatch):
    chunk = make_chunk()
    chunk.put(diskonly)
    stored = chunk.open(diskonly)
    started, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(fd, buffers, offset):
        started.set()
        assert go_on.wait(10)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(stored.read_layers, 0, 1)
        assert started.wait(10)
        closing = pool.submit(stored.close)
        time.sleep(0.05)
        assert not closing.done()
        go_on.set()
        assert torch.equal(reading.result()[0], chunk.kv.keys[:1])
        closing.result()


def open_files(kv_dir):
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return [t for t in (os.readlink(link) for link in links if os.path.islink(link)) if t.endswith(".safetensors")]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_no_file_stays_open(kv_dir, make_chunk):
    chunk = make_chunk()
    with KVStore(kv_dir, memory_bytes=0) as store:
        chunk.put(store)
        stored = chunk.open(store)
        assert len(open_files(kv_dir)) == 1
        stored.read_layers(0, 3)
        assert open_files(kv_dir) == []
        stored.close()
        chunk.open(store).close()
        assert open_files(kv_dir) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_forgotten_chunk_closes_its_file(store, kv_dir, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    forgotten = chunk.open(store)
    forgotten.read_layers(0, 1)
    del forgotten
    gc.collect()
    assert open_files(kv_dir) == []
    assert torch.equal(chunk.open(store).read_layers(0, 3)[0], chunk.kv.keys)
