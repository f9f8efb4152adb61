"""The native reader of pieces gives what Python gives, notices what Python notices, and leaves what it cannot do."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fused_kv_kernels.native.piece_reader import native_piece_reader
from fused_kv_llm.errors import ChunkDamagedError, FusedKVWarning, StoreUnavailableError
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.format.digests import Digests
from fused_kv_llm.store.read import native_pieces, pieces
from fused_kv_llm.thread_pool import available_cores

pytestmark = pytest.mark.skipif(native_piece_reader() is None, reason="no native reader of files here")

HALF_MIB = {"layers": 8, "heads": 4, "tokens": 64, "dim": 64}


@pytest.fixture
def outcomes(monkeypatch):
    """What the native reader says, a list of one for each call."""
    found, real = [], native_pieces.read_natively

    def noting(*args, **kwargs):
        found.append(real(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(pieces, "read_natively", noting)
    return found


def load(stored, chunk):
    keys, values = torch.full((2, *chunk.kv.keys.shape), float("nan"))
    stored.copy_layers(0, len(keys), keys, values)
    assert torch.equal(keys, chunk.kv.keys)
    assert torch.equal(values, chunk.kv.values)


def uncache(path: Path, *kept: tuple[int, int]) -> bool:
    """Have the system forget a file but for some stretches; False if it does not."""
    with path.open("rb") as file:
        fd = file.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for offset, nbytes in kept:
            os.pread(fd, nbytes, offset)
        try:
            return os.preadv(fd, [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT) != 1
        except OSError:
            return True


def test_a_chunk_of_ordinary_size_is_read_natively(diskonly, make_chunk, outcomes):
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    for _ in range(2):
        with chunk.open(diskonly) as stored:
            load(stored, chunk)
    assert outcomes == [native_pieces.Outcome([], [])] * 2


@pytest.mark.parametrize("read_before", [False, True])
def test_what_the_system_has_forgotten_is_read_and_verified_in_python(
    diskonly, kv_dir, make_chunk, outcomes, monkeypatch, read_before
):
    chunk, hashed, digest = make_chunk(**HALF_MIB), [], pieces._digest
    chunk.put(diskonly)
    if read_before:
        with chunk.open(diskonly) as stored:
            load(stored, chunk)
        outcomes.clear()
    monkeypatch.setattr(pieces, "_digest", lambda piece: hashed.append(sum(map(len, piece))) or digest(piece))
    monkeypatch.setattr(native_pieces, "_TOGETHER_NBYTES", 1)
    nbytes = chunk.path(kv_dir).stat().st_size
    if not uncache(chunk.path(kv_dir), (0, 300 << 10), (nbytes - 4096, 4096)):
        pytest.skip("this file system keeps everything in memory")
    with chunk.open(diskonly) as stored:
        load(stored, chunk)
    (outcome,) = outcomes
    assert outcome.left
    left = sum(last - first for _, first, last in outcome.left)
    assert hashed == [chunk.kv.keys[0].nbytes] * left
    assert left < 16 or outcome.left == [(0, 0, 8), (1, 0, 8)]


@pytest.mark.parametrize("refused", [False, True])
def test_a_known_file_is_begun_at_its_beginning(diskonly, kv_dir, make_chunk, monkeypatch, refused):
    """Who reads the header has the system read ahead; who knows it already has to ask for that, once."""
    chunk = make_chunk(**{**HALF_MIB, "tokens": 128})
    chunk.put(diskonly)
    advice, path = [], chunk.path(kv_dir)

    def advise(fd, offset, nbytes, what):
        advice.append((offset, nbytes, what))
        if refused:
            raise OSError(22, "Invalid argument")

    for known_before in (False, True):
        if not uncache(path):
            pytest.skip("this file system keeps everything in memory")
        with monkeypatch.context() as patch, chunk.open(diskonly) as stored:
            patch.setattr(os, "posix_fadvise", advise)
            keys, values = torch.empty_like(chunk.kv.keys), torch.empty_like(chunk.kv.values)
            for first in range(0, 8, 2):
                layers = slice(first, first + 2)
                stored.copy_layers(first, first + 2, keys[layers], values[layers])
        assert torch.equal(keys, chunk.kv.keys)
        assert torch.equal(values, chunk.kv.values)
        assert advice == [(0, 0, os.POSIX_FADV_SEQUENTIAL)] * known_before


def test_a_damaged_piece_is_named(diskonly, kv_dir, make_chunk, outcomes):
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    raw = bytearray(chunk.path(kv_dir).read_bytes())
    for name, layer, place in (("v", 7, len(raw) - 1), ("k", 3, len(raw) - 13 * chunk.kv.keys[0].nbytes)):
        damaged = bytearray(raw)
        damaged[place] ^= 0x80
        chunk.path(kv_dir).write_bytes(damaged)
        expected = pytest.raises(ChunkDamagedError, match=f"'{name}' of layer {layer} does")
        with KVStore(kv_dir, memory_bytes=0, read_only=True) as reader, chunk.open(reader) as stored, expected:
            load(stored, chunk)
        assert outcomes[-1].damaged == [(name, layer)]


def test_a_file_that_is_shortened_meanwhile_costs_its_last_layers(diskonly, kv_dir, make_chunk):
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        os.truncate(chunk.path(kv_dir), chunk.path(kv_dir).stat().st_size - 1)
        with pytest.raises(ChunkDamagedError, match="layer 7 cannot be read"):
            load(stored, chunk)
        assert torch.equal(stored.read_layers(0, 7)[1], chunk.kv.values[:7])


@pytest.mark.parametrize("digest", ["", "0" * 15, "g" * 16, "A" * 16, "0" * 32, " " * 16])
def test_a_checksum_that_is_none_is_never_met(diskonly, make_chunk, digest):
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        header = stored._source.header
        parts = [dataclasses.replace(part, digests=Digests([digest, *part.digests[1:]])) for part in header.parts]
        stored._source.header = dataclasses.replace(header, parts=tuple(parts))
        with pytest.raises(ChunkDamagedError, match="'k' of layer 0 does"):
            load(stored, chunk)


@pytest.mark.parametrize("tokens", [63, 64])
@pytest.mark.parametrize("cut", [slice(0, 60), slice(3, 63), slice(1, 62)])
def test_a_part_of_the_tokens(diskonly, make_chunk, outcomes, tokens, cut):
    """What goes nowhere is hashed like the rest; rows whose bytes are no whole stripes are left to Python."""
    chunk = make_chunk(**{**HALF_MIB, "tokens": tokens, "dim": 72})
    chunk.put(diskonly)
    width = len(range(tokens)[cut])
    cache = torch.full((2, 8, 4, 80, 72), float("nan"))
    keys, values = cache[:, :, :, 5 : 5 + width].unbind()
    with chunk.open(diskonly) as stored:
        stored.copy_layers(0, 8, keys, values, cut)
    assert torch.equal(keys, chunk.kv.keys[:, :, cut])
    assert torch.equal(values, chunk.kv.values[:, :, cut])
    cache[:, :, :, 5 : 5 + width].fill_(float("nan"))
    assert cache.isnan().all(), "something was written beside the target"
    row_nbytes = 72 * 4
    whole_stripes = all(n * row_nbytes % 64 == 0 for n in (cut.start, width, tokens - cut.stop))
    assert (outcomes == [native_pieces.Outcome([], [])]) == whole_stripes
    assert (outcomes == [None]) != whole_stripes


def test_many_threads_read_many_chunks(diskonly, make_chunk, monkeypatch):
    monkeypatch.setattr(pieces, "_SHARED_NBYTES", 0)
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


def test_without_the_library_python_reads(diskonly, make_chunk, monkeypatch):
    monkeypatch.setattr(native_pieces, "_library", lambda: None)
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        load(stored, chunk)


def test_a_library_that_computes_something_else_is_not_used():
    class Wrong:
        def fkv_xxh3_64(self, segments, count):
            return 1

    with pytest.warns(FusedKVWarning, match="other checksums than xxhash"):
        assert not native_pieces._agrees(Wrong())
    assert native_pieces._agrees(native_piece_reader())


SCRIPT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from fused_kv_kernels.native.piece_reader import native_piece_reader
    print(native_piece_reader())
    native_piece_reader()
print(len(caught), *(str(w.message) for w in caught))
"""


def _run(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout


def test_the_environment_turns_it_off():
    assert _run(FUSED_KV_KERNELS="torch").splitlines() == ["None", "0"]


def test_a_missing_compiler_is_for_the_operators_to_tell(tmp_path):
    assert _run(PATH=str(tmp_path), CXX="", FUSED_KV_CACHE=str(tmp_path)).splitlines() == ["None", "0"]


def test_a_compiler_that_fails_is_told_with_what_it_said(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho no such header >&2; exit 1\n')
    compiler.chmod(0o755)
    output = _run(CXX=str(compiler), FUSED_KV_CACHE=str(tmp_path))
    assert output.startswith("None\n1 ")
    assert "no such header" in output


def test_a_damaged_library_is_made_again(tmp_path):
    _run(FUSED_KV_CACHE=str(tmp_path))
    (library,) = (tmp_path / "native").glob("reading-*.so")
    library.write_bytes(b"not a library")
    output = _run(FUSED_KV_CACHE=str(tmp_path))
    assert "CDLL" in output
    assert output.endswith("\n0\n")


def test_a_store_that_is_closed_meanwhile_gives_right_chunks_or_an_error(kv_dir, make_chunk, monkeypatch):
    monkeypatch.setattr(pieces, "_SHARED_NBYTES", 0)
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
def test_neither_reads_nor_failures_leave_files_open(diskonly, kv_dir, make_chunk, monkeypatch):
    monkeypatch.setattr(pieces, "_SHARED_NBYTES", 0)
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
def test_a_forked_process_reads_too(diskonly, make_chunk, monkeypatch):
    """The child uses numpy: torch's threads do not survive a fork."""
    monkeypatch.setattr(pieces, "_SHARED_NBYTES", 0)
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        load(stored, chunk)
    found, want = np.zeros((2, *chunk.kv.keys.shape), np.float32), chunk.kv.keys.numpy()
    keys, values = (torch.from_numpy(part) for part in found)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)
            with chunk.open(diskonly) as stored:
                stored.copy_layers(0, 8, keys, values)
            code = int(not np.array_equal(found[0], want))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
@pytest.mark.skipif(available_cores() < 2, reason="a helper needs a core of its own")
def test_a_second_thread_reads_a_large_chunk(diskonly, make_chunk, monkeypatch):
    """It stays out of the way of signals, and off the core of whoever it helps."""
    monkeypatch.setattr(pieces, "_SHARED_NBYTES", 0)
    chunk = make_chunk(**HALF_MIB)
    chunk.put(diskonly)
    with chunk.open(diskonly) as stored:
        load(stored, chunk)
    tasks = [
        task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("fused-kv-hel")
    ]
    assert len(tasks) == 1
    status = dict(line.split(":\t") for line in (tasks[0] / "status").read_text().splitlines() if ":\t" in line)
    assert int(status["SigBlk"], 16) & 1 << signal.SIGINT - 1
    assert len(os.sched_getaffinity(int(tasks[0].name))) == available_cores() - 1
