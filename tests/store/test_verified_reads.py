"""Every read of a file is verified; damage costs the layers that it hits, and nothing stays open or is read twice."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fused_kv_llm.errors import ChunkDamagedError, StoreUnavailableError
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.folder import layout
from fused_kv_llm.store.format import part
from fused_kv_llm.store.read import reader

HALF_MIB = {"layers": 8, "heads": 4, "tokens": 64, "dim": 64}


@pytest.fixture
def hashed(monkeypatch):
    """The bytes of every piece that was hashed."""
    found, digest = [], part.xxhash.xxh3_64_hexdigest

    class Counting:
        @staticmethod
        def xxh3_64_hexdigest(piece):
            found.append(len(piece))
            return digest(piece)

    monkeypatch.setattr(part, "xxhash", Counting)
    return found


def load(stored, chunk):
    """Read all layers in two groups, and compare them."""
    middle = len(chunk.kv.keys) // 2
    for start, stop in ((0, middle), (middle, len(chunk.kv.keys))):
        keys, values = stored.read_layers(start, stop)
        assert torch.equal(keys, chunk.kv.keys[start:stop])
        assert torch.equal(values, chunk.kv.values[start:stop])


def test_every_read_is_hashed(diskonly, make_chunk, hashed):
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    hashed.clear()
    for times in (1, 2, 3):
        with chunk.open(diskonly) as stored:
            load(stored, chunk)
        assert hashed == [chunk.kv.keys[0].nbytes] * 8 * times


@pytest.mark.parametrize("announced", [False, True])
def test_a_bit_that_the_disk_changed_is_found(diskonly, kv_dir, make_chunk, monkeypatch, announced):
    """Nothing tells such a file from the one that was read before, and asking brings it into the system's cache."""
    real = layout.file_version
    for module in (layout, reader):
        monkeypatch.setattr(module, "file_version", lambda info: real(info)._replace(changed_ns=0, modified_ns=0))
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    path = chunk.path(kv_dir)
    with chunk.open(diskonly) as stored:
        load(stored, chunk)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with chunk.open(diskonly) as stored:
        if announced:
            stored.announce_layers(0, 4)
        with pytest.raises(ChunkDamagedError, match="'v' of layer 3"):
            stored.read_layers(0, 4)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_file_that_was_touched_is_not_believed(diskonly, kv_dir, make_chunk, reopened):
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        load(stored, chunk)
    stored = None if reopened else chunk.open(diskonly)
    path = chunk.path(kv_dir)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    # Times of content can be set back; that it was done shows in another time.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with stored or chunk.open(diskonly) as opened, pytest.raises(ChunkDamagedError, match="'v' of layer 3"):
        opened.read_layers(0, 4)


def test_what_is_in_memory_is_not_served_once_its_file_was_touched(store, kv_dir, make_chunk):
    chunk = make_chunk(layers=4)
    chunk.put(store)
    with chunk.open(store) as stored:
        load(stored, chunk)
    path = chunk.path(kv_dir)
    path.with_suffix(".new").write_bytes(path.read_bytes())
    os.replace(path.with_suffix(".new"), path)
    with chunk.open(store) as stored:
        assert stored.tier == "disk"
        load(stored, chunk)
    with chunk.open(store) as stored:
        assert stored.tier == "memory"
    assert store.stats().memory_bytes == chunk.kv.nbytes


def test_an_error_while_reading_costs_the_layers_it_hits(diskonly, make_chunk, monkeypatch):
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    real, size = os.preadv, chunk.kv.keys[0].nbytes
    with chunk.open(diskonly) as stored:
        begin = stored._header.parts[0].start + 2 * size

        def broken(fd, buffers, offset, *flags):
            if offset < begin + size and offset + sum(map(len, buffers)) > begin:
                raise OSError(5, "Input/output error")
            return real(fd, buffers, offset, *flags)

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(ChunkDamagedError, match="layer 2 cannot be read"):
            stored.read_layers(0, 4)
        for start, stop in ((0, 2), (3, 4)):
            assert torch.equal(stored.read_layers(start, stop)[0], chunk.kv.keys[start:stop])


def test_every_damage_is_noticed(diskonly, kv_dir, make_chunk):
    """A damaged piece is named, wherever it is; a file that was shortened costs its last layers."""
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    raw, size = chunk.path(kv_dir).read_bytes(), chunk.kv.keys[0].nbytes
    for number in range(8):
        damaged = bytearray(raw)
        damaged[len(raw) - (number + 1) * size + number] ^= 1
        chunk.path(kv_dir).write_bytes(damaged)
        with KVStore(kv_dir, memory_bytes=0, read_only=True) as reader, chunk.open(reader) as stored:
            name, layer = ("v", 3 - number) if number < 4 else ("k", 7 - number)
            with pytest.raises(ChunkDamagedError, match=rf"'{name}' of layer {layer} does"):
                stored.read_layers(0, 4)
    chunk.path(kv_dir).write_bytes(raw)
    with KVStore(kv_dir, memory_bytes=0, read_only=True) as reader, chunk.open(reader) as stored:
        os.truncate(chunk.path(kv_dir), len(raw) - 1)
        with pytest.raises(ChunkDamagedError, match="layer 3 cannot be read"):
            stored.read_layers(0, 4)
        assert torch.equal(stored.read_layers(0, 3)[1], chunk.kv.values[:3])


@pytest.mark.parametrize("digest", ["", "0" * 15, "g" * 16, "A" * 16, "0" * 32, " " * 16])
def test_a_checksum_that_is_none_is_never_met(diskonly, make_chunk, digest):
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        header = stored._header
        parts = [dataclasses.replace(part, digests=(digest, *part.digests[1:])) for part in header.parts]
        stored._source.header = dataclasses.replace(header, parts=tuple(parts))
        with pytest.raises(ChunkDamagedError, match="'k' of layer 0 does"):
            stored.read_layers(0, 8)


def test_a_known_file_is_begun_at_its_beginning(diskonly, make_chunk, monkeypatch):
    """Who reads the header has the system read ahead; who knows it already has to ask for that, once."""
    chunk = make_chunk(**{**HALF_MIB, "tokens": 128})
    chunk.put(diskonly)
    advice = []

    def advise(fd, offset, nbytes, what):
        advice.append((offset, nbytes, what))
        raise OSError(22, "Invalid argument")

    for _ in range(2):
        advice.clear()
        with monkeypatch.context() as patch, chunk.open(diskonly) as stored:
            patch.setattr(os, "posix_fadvise", advise)
            load(stored, chunk)
        assert advice == [(0, 0, os.POSIX_FADV_SEQUENTIAL)]


def test_many_threads_read_many_chunks(diskonly, make_chunk):
    chunks = [make_chunk(seed, **HALF_MIB) for seed in range(6)]
    for chunk in chunks:
        chunk.put(diskonly)
    gate = threading.Barrier(6)

    def work(number):
        gate.wait(30)
        for turn in range(12):
            chunk = chunks[(number * turn) % 6]
            with chunk.open(diskonly) as stored:
                load(stored, chunk)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_a_store_that_is_closed_meanwhile_gives_right_chunks_or_an_error(kv_dir, make_chunk):
    chunk, begun = make_chunk(**HALF_MIB), threading.Barrier(5)
    with KVStore(kv_dir) as store:
        chunk.put(store)

    def work(store):
        begun.wait(30)
        for _ in range(200):
            try:
                stored = chunk.open(store)
            except StoreUnavailableError:
                return True
            with stored:
                load(stored, chunk)
        return False

    for _ in range(4):
        store = KVStore(kv_dir, memory_bytes=0)
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(work, store) for _ in range(4)]
            begun.wait(30)
            store.close()
            assert all(run.result() for run in runs)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_neither_reads_nor_failures_leave_files_open(diskonly, kv_dir, make_chunk):
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        load(stored, chunk)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with chunk.open(diskonly) as stored:
            load(stored, chunk)
    with chunk.path(kv_dir).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\0damaged"[:5])
    for _ in range(20):
        with chunk.open(diskonly) as stored, pytest.raises(ChunkDamagedError):
            load(stored, chunk)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_reads_too(diskonly, make_chunk):
    """The child uses numpy: torch's threads do not survive a fork."""
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        load(stored, chunk)
    want = chunk.kv.keys.numpy()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)
            with chunk.open(diskonly) as stored:
                code = int(not np.array_equal(stored.read_layers(0, 8)[0].numpy(), want))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
