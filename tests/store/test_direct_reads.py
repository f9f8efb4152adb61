"""Layers are read straight to where a request needs them, and verified as often as they come from a disk."""

from __future__ import annotations

import os
import random
import tempfile
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.read import native_pieces, pieces, reader
from fused_kv_llm.store.read.strided import layer_segments


@pytest.fixture(scope="module")
def shared():
    with tempfile.TemporaryDirectory() as folder, KVStore(folder, memory_bytes=0) as store:
        yield store


@pytest.fixture
def hashed(monkeypatch):
    """The number of bytes that were hashed, a list of one for each piece."""
    found = []
    digest = pieces._digest

    def counting(piece):
        found.append(sum(map(len, piece)))
        return digest(piece)

    monkeypatch.setattr(pieces, "_digest", counting)
    return found


@contextmanager
def read_by(way: str):
    """Have reads of any size done by Python, or by native code, where two threads take blocks of a piece each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_NATIVE_NBYTES", 0 if way == "native" else 1 << 40)
        patch.setattr(pieces, "_SHARED_NBYTES", 0)
        patch.setattr(native_pieces, "_TOGETHER_NBYTES", 1)
        yield patch


WAYS = ["python", "native"]


@settings(max_examples=240, deadline=None)
@given(data=st.data(), way=st.sampled_from(WAYS))
def test_strided_targets_get_what_a_copy_gives(shared, make_chunk, data, way):
    layers, heads, tokens = (data.draw(st.integers(1, most), label) for label, most in (("L", 5), ("H", 3), ("T", 20)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    chunk = make_chunk(layers * 100 + heads * 10 + tokens, layers=layers, heads=heads, tokens=tokens, dtype=dtype)
    chunk.put(shared)
    start = data.draw(st.integers(0, layers - 1))
    stop = data.draw(st.integers(start + 1, layers))
    first = data.draw(st.integers(0, tokens - 1))
    last = data.draw(st.integers(first + 1, tokens))
    room, at = data.draw(st.integers(last - first, last - first + 4)), data.draw(st.integers(0, 3))
    cache = torch.full((2, layers, heads, at + room, 8), float("nan"), dtype=dtype)
    place = cache[:, start:stop, :, at : at + last - first]
    with chunk.open(shared) as stored, read_by(way):
        stored.copy_layers(start, stop, place[0], place[1], slice(first, last))
    assert torch.equal(place[0], chunk.kv.keys[start:stop, :, first:last])
    assert torch.equal(place[1], chunk.kv.values[start:stop, :, first:last])
    place.fill_(float("nan"))
    assert cache.isnan().all(), "something was written beside the target"


def test_a_whole_chunk_needs_no_buffer_of_the_store(diskonly, make_chunk):
    chunk = make_chunk()
    chunk.put(diskonly)
    keys, values = torch.empty_like(chunk.kv.keys), torch.empty_like(chunk.kv.values)
    with chunk.open(diskonly) as stored:
        stored.copy_layers(0, 3, keys, values)
        assert stored._source._tensors == {}
        assert torch.equal(stored.read_layers(0, 3)[0], keys)
    assert torch.equal(keys, chunk.kv.keys)
    assert torch.equal(values, chunk.kv.values)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(lambda kv: kv.double(), id="another dtype"),
        pytest.param(lambda kv: torch.empty(*kv.shape[:3], 16)[..., ::2], id="dimensions apart"),
        pytest.param(lambda kv: torch.empty(*kv.shape[:2], 10, 8)[:, :, ::2], id="tokens apart"),
    ],
)
def test_other_targets_are_copied_to(diskonly, make_chunk, target):
    chunk = make_chunk()
    chunk.put(diskonly)
    keys, values = target(chunk.kv.keys), target(chunk.kv.values)
    assert layer_segments(keys.float() if keys.dtype == torch.double else keys, (3, 2, 4, 8), range(4)) is None
    with chunk.open(diskonly) as stored:
        stored.copy_layers(0, 3, keys, values)
    assert torch.equal(keys.float(), chunk.kv.keys)
    assert torch.equal(values.float(), chunk.kv.values)


def test_what_the_memory_tier_keeps_is_read_once(store, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    keys, values = torch.empty_like(chunk.kv.keys), torch.empty_like(chunk.kv.values)
    with chunk.open(store) as stored:
        stored.copy_layers(0, 3, keys, values)
    with chunk.open(store) as stored:
        assert stored.tier == "memory"
    assert torch.equal(keys, chunk.kv.keys)


def _load(store, chunk):
    keys, values = torch.empty_like(chunk.kv.keys), torch.empty_like(chunk.kv.values)
    with chunk.open(store) as stored:
        stored.copy_layers(0, chunk.kv.keys.shape[0], keys, values)
    assert torch.equal(keys, chunk.kv.keys)
    assert torch.equal(values, chunk.kv.values)


def test_every_read_is_hashed(diskonly, kv_dir, make_chunk, hashed):
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    for times in (1, 2):
        _load(diskonly, chunk)
        assert sum(hashed) == times * chunk.kv.nbytes
    with chunk.open(diskonly) as stored:
        stored.read_layers(0, 4)
    assert sum(hashed) == 3 * chunk.kv.nbytes


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_bit_that_the_disk_changed_is_found(diskonly, kv_dir, make_chunk, monkeypatch, way, announced):
    """Nothing tells such a file from the one that was read before, and asking brings it into the system's cache."""
    monkeypatch.setattr(reader, "file_version", lambda info: (info.st_ino, info.st_size, 0, 0))
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    path = chunk.path(kv_dir)
    with read_by(way):
        _load(diskonly, chunk)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        with chunk.open(diskonly) as stored:
            if announced:
                stored.announce_layers(0, 4)
            with pytest.raises(ChunkDamagedError, match="'v' of layer 3"):
                stored.copy_layers(0, 4, torch.empty_like(chunk.kv.keys), torch.empty_like(chunk.kv.values))


@pytest.mark.skipif(native_pieces._library() is None, reason="no native reader of files here")
@pytest.mark.parametrize("seed", range(20))
def test_what_is_cached_in_part_is_read_whole(diskonly, make_chunk, hashed, monkeypatch, seed):
    """Whatever native code leaves is read by Python, all of it hashed."""
    chunk, rng, real, left = make_chunk(layers=12), random.Random(seed), native_pieces._library(), []

    def read_pieces(*arguments):
        real.fkv_read_pieces(*arguments)
        states = arguments[4]
        left.extend(number for number in range(24) if rng.random() < 0.3)
        for number in left:
            states[number] = 0
            # What is left has never been written.
            (keys if number < 12 else values)[number % 12] = float("nan")
        return 1

    chunk.put(diskonly)
    keys, values = torch.empty_like(chunk.kv.keys), torch.empty_like(chunk.kv.values)
    monkeypatch.setattr(native_pieces, "_library", lambda: SimpleNamespace(fkv_read_pieces=read_pieces))
    with read_by("native"), chunk.open(diskonly) as stored:
        stored.copy_layers(0, 12, keys, values)
    assert torch.equal(keys, chunk.kv.keys)
    assert torch.equal(values, chunk.kv.values)
    assert left
    assert hashed == [chunk.kv.keys[0].nbytes] * len(left)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_file_that_was_touched_is_not_believed(diskonly, kv_dir, make_chunk, reopened):
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    _load(diskonly, chunk)
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
    keys, values = torch.empty_like(chunk.kv.keys), torch.empty_like(chunk.kv.values)
    with stored or chunk.open(diskonly) as opened, pytest.raises(ChunkDamagedError, match="'v' of layer 3"):
        opened.copy_layers(0, 4, keys, values)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_while_reading_costs_the_layers_it_hits(diskonly, make_chunk, monkeypatch, way):
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    real, size = os.preadv, chunk.kv.keys[0].nbytes
    keys, values = torch.empty_like(chunk.kv.keys), torch.empty_like(chunk.kv.values)
    with chunk.open(diskonly) as stored:
        begin = stored._source.header.parts[0].start + 2 * size

        def broken(fd, buffers, offset, *flags):
            if offset < begin + size and offset + sum(map(len, buffers)) > begin:
                raise OSError(5, "Input/output error")
            return real(fd, buffers, offset, *flags)

        monkeypatch.setattr(os, "preadv", broken)
        # Native code leaves what it cannot read to Python.
        monkeypatch.setattr(native_pieces, "_library", lambda: SimpleNamespace(fkv_read_pieces=lambda *_: 1))
        with read_by(way):
            with pytest.raises(ChunkDamagedError, match="layer 2 cannot be read"):
                stored.copy_layers(0, 4, keys, values)
            stored.copy_layers(0, 2, keys[:2], values[:2])
    assert torch.equal(keys[:2], chunk.kv.keys[:2])


@pytest.mark.parametrize("target", ["into a cache", "into memory"])
@pytest.mark.parametrize("way", WAYS)
def test_every_damage_is_noticed(diskonly, kv_dir, make_chunk, target, way):
    """A piece that is damaged is told by its name, wherever it is; a file that was shortened costs its last layers."""
    chunk = make_chunk(layers=4)
    chunk.put(diskonly)
    keys, values = torch.empty_like(chunk.kv.keys), torch.empty_like(chunk.kv.values)
    raw, size = chunk.path(kv_dir).read_bytes(), chunk.kv.keys[0].nbytes

    def read(stored, start, stop):
        if target == "into memory":
            return stored.read_layers(start, stop)
        stored.copy_layers(start, stop, keys[start:stop], values[start:stop])
        return keys[start:stop], values[start:stop]

    for number in range(8):
        damaged = bytearray(raw)
        damaged[len(raw) - (number + 1) * size + number] ^= 1
        chunk.path(kv_dir).write_bytes(damaged)
        with KVStore(kv_dir, memory_bytes=0, read_only=True) as reader, read_by(way), chunk.open(reader) as stored:
            name, layer = ("v", 3 - number) if number < 4 else ("k", 7 - number)
            with pytest.raises(ChunkDamagedError, match=rf"'{name}' of layer {layer} does"):
                read(stored, 0, 4)
    chunk.path(kv_dir).write_bytes(raw)
    with KVStore(kv_dir, memory_bytes=0, read_only=True) as reader, read_by(way), chunk.open(reader) as stored:
        os.truncate(chunk.path(kv_dir), len(raw) - 1)
        with pytest.raises(ChunkDamagedError, match="layer 3 cannot be read"):
            read(stored, 0, 4)
        assert torch.equal(read(stored, 0, 3)[1], chunk.kv.values[:3])
