"""Whatever happens to a file: a miss and one warning, never a wrong tensor and never a crash."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import random
import sqlite3
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fused_kv_llm.errors import ChunkDamagedError, FusedKVWarning, StoreUnavailableError
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.format import codec, tensor_encoder, tensor_file

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


def quarantined(kv_dir: Path) -> list[Path]:
    return list((kv_dir / "quarantine").iterdir())


def assert_miss_and_warning(store, kv_dir, chunk, says):
    with pytest.warns(FusedKVWarning) as record:
        assert chunk.open(store) is None
    assert len(record) == 1
    message = str(record[0].message)
    assert chunk.key in message
    assert says in message
    assert not os.path.lexists(chunk.path(kv_dir))
    assert store.contains([chunk.key]) == set()
    assert store.stats().memory_chunks == 0
    # A second look is a plain miss.
    assert chunk.open(store) is None
    return message


def assert_moved_away(store, kv_dir, chunk, says):
    message = assert_miss_and_warning(store, kv_dir, chunk, says)
    (moved,) = quarantined(kv_dir)
    assert str(moved) in message
    # And the chunk can be stored and read again.
    assert chunk.put(store) > 0
    assert torch.equal(chunk.open(store).read_layers(0, 3)[0], chunk.kv.keys)


def truncate_to(size):
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def append(path):
    with path.open("ab") as file:
        file.write(b"\0")


def claim_a_giant_header(path):
    with path.open("r+b") as file:
        file.write((1 << 62).to_bytes(8, "little"))


def foreign_safetensors(path):
    tensors = {"k": torch.zeros(3, 2, 5, 8), "v": torch.zeros(3, 2, 5, 8)}
    save_file(tensors, path, metadata={"key": path.stem, "format_version": "1"})


def a_pickle(path):
    path.write_bytes(pickle.dumps({"k": [1, 2, 3]}))


def deep_json(path):
    raw = bytearray(tensor_file._OPENING + b"0" * 16 + b'"},"x":' + b"[" * 100_000)
    raw[tensor_file.HEADER_CHECKSUM] = tensor_file.header_checksum(raw)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate_to(0), "only 0 bytes"),
        (truncate_to(5), "only 5 bytes"),
        (truncate_to(100), "header"),
        (truncate_to(-1), "bytes"),
        (append, "bytes"),
        (claim_a_giant_header, "header"),
        (foreign_safetensors, "not a chunk-KV file"),
        (a_pickle, "header"),
        (lambda path: path.write_bytes(b"\x00" * 4096), "not a chunk-KV file"),
        (deep_json, "cannot be understood"),
    ],
)
def test_damaged_or_foreign_file(store, kv_dir, make_chunk, damage, says):
    chunk = make_chunk()
    chunk.put(store)
    damage(chunk.path(kv_dir))
    assert_moved_away(store, kv_dir, chunk, says)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_something_else_where_the_file_was(store, kv_dir, make_chunk, kind):
    chunk, other = make_chunk(1), make_chunk(2)
    chunk.put(store)
    other.put(store)
    path = chunk.path(kv_dir)
    path.unlink()
    {
        "link": lambda: path.symlink_to(other.path(kv_dir)),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
    }[kind]()
    assert_moved_away(store, kv_dir, chunk, "not a regular file")
    assert other.open(store) is not None


def test_other_format_version(store, kv_dir, make_chunk, monkeypatch):
    chunk = make_chunk()
    with monkeypatch.context() as patch:
        patch.setattr(codec, "FORMAT_VERSION", 99)
        chunk.put(store)
    assert_moved_away(store, kv_dir, chunk, "format version 99")


def test_file_of_another_chunk(store, kv_dir, make_chunk):
    chunk, other = make_chunk(1), make_chunk(2)
    chunk.put(store)
    other.put(store)
    chunk.path(kv_dir).write_bytes(other.path(kv_dir).read_bytes())
    assert_moved_away(store, kv_dir, chunk, f"another chunk, {other.key[:16]}")


@pytest.mark.parametrize("tier", ["disk", "memory"])
def test_token_ids_that_differ(store, kv_dir, make_chunk, tier):
    chunk = make_chunk()
    chunk.put(store)
    if tier == "memory":
        chunk.open(store).read_layers(0, 3)
    ids = (*chunk.kv.token_ids[:-1], chunk.kv.token_ids[-1] + 1)
    with pytest.warns(FusedKVWarning, match="token ids") as record:
        assert store.open(chunk.key, ids) is None
    assert len(record) == 1
    assert len(quarantined(kv_dir)) == 1
    assert chunk.open(store) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda h, private: private["tensors"]["k"].update(shape=[3, 2, 5, 9]),
        lambda h, private: private["tensors"]["k"].update(dtype="I64"),
        lambda h, private: private["tensors"]["v"].update(xxh3_64=[]),
        lambda h, private: private["about"].update(shape=[3, 2, -5, -8]),
        lambda h, private: private["about"].update(shape=[6, 1, 5, 8]),
        lambda h, private: private["about"].update(token_ids=[1, 2, 3, 4]),
        lambda h, private: private["about"].update(storage="int8"),
        lambda h, private: private["about"].update(storage=None),
        lambda h, private: private.pop("about"),
        lambda h, private: h["k"].update(data_offsets=[0, 1 << 40]),
        lambda h, private: h.pop("v"),
        lambda h, private: h["__metadata__"].update(identity=7),
    ],
)
def test_whole_header_that_contradicts_itself(store, kv_dir, make_chunk, change):
    chunk = make_chunk()
    chunk.put(store)
    raw = chunk.path(kv_dir).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    parsed = json.loads(raw[8 : 8 + length])
    private = json.loads(parsed["__metadata__"]["private"])
    change(parsed, private)
    metadata = parsed.pop("__metadata__")
    metadata |= {"private": json.dumps(private)}
    del metadata["header_xxh3_64"]
    chunk.path(kv_dir).write_bytes(tensor_encoder.encode_header(metadata, parsed) + raw[8 + length :])
    assert_miss_and_warning(store, kv_dir, chunk, "")


@pytest.mark.parametrize("in_memory", [False, True])
def test_vanished_file_is_a_miss(store, kv_dir, make_chunk, in_memory):
    chunk = make_chunk()
    chunk.put(store)
    chunk.path(kv_dir).unlink()
    if in_memory:
        store.drop_memory()
    assert_miss_and_warning(store, kv_dir, chunk, "vanished")
    assert chunk.put(store) > 0


def test_put_replaces_a_vanished_file(store, kv_dir, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    last = int(next(store.content_hashes(chunk.identity)).rowid[-1])
    chunk.path(kv_dir).unlink()
    assert chunk.put(store) > 0
    assert store.keys(chunk.identity, last) == [chunk.key]
    assert chunk.open(store) is not None


def test_unknown_chunk_is_a_silent_miss(store, make_chunk):
    assert make_chunk().open(store) is None


def test_file_that_cannot_be_opened_now_is_left_alone(store, kv_dir, make_chunk, monkeypatch):
    chunk = make_chunk()
    chunk.put(store)
    with monkeypatch.context() as patch:
        patch.setattr(store._parts.folder, "open_chunk", lambda *_: os.open("/proc/self/mem/none", os.O_RDONLY))
        with pytest.warns(FusedKVWarning, match="cannot be read now"):
            assert chunk.open(store) is None
    assert chunk.open(store) is not None


@pytest.fixture(scope="module")
def flipping_store():
    with tempfile.TemporaryDirectory() as folder, KVStore(folder, memory_bytes=0) as store:
        yield store


@settings(max_examples=150)
@given(data=st.data())
def test_every_flipped_byte_is_noticed(flipping_store, make_chunk, data):
    store = flipping_store
    chunk = make_chunk(11, layers=2, heads=1, tokens=3, dim=4)
    chunk.put(store)
    path = chunk.path(store.kv_dir)
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    part = data.draw(st.sampled_from(["length", "header", "data"]))
    first, last = {"length": (0, 7), "header": (8, 7 + length), "data": (8 + length, len(raw) - 1)}[part]
    offset = data.draw(st.integers(first, last))
    raw[offset] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    if part == "data":
        layer = (offset - 8 - length) // (len(chunk.kv.token_ids) * 4 * 4) % 2
        with chunk.open(store) as stored:
            with pytest.raises(ChunkDamagedError, match=f"layer {layer}"):
                stored.read_layers(0, 2)
            good, _ = stored.read_layers(1 - layer, 2 - layer)
            assert torch.equal(good[0], chunk.kv.keys[1 - layer])
        with pytest.warns(FusedKVWarning):
            assert store.discard(chunk.key, "checksum")
    else:
        with pytest.warns(FusedKVWarning) as record:
            assert chunk.open(store) is None
        assert len(record) == 1
    assert not path.exists()


def test_only_the_damaged_layer_is_lost(store, kv_dir, make_chunk):
    chunk = make_chunk(layers=5)
    chunk.put(store)
    path = chunk.path(kv_dir)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    raw[-1 - chunk.kv.values[0].nbytes * 3] ^= 1
    path.write_bytes(raw)
    with chunk.open(store) as stored:
        for layer in (0, 2, 3):
            keys, values = stored.read_layers(layer, layer + 1)
            assert torch.equal(keys[0], chunk.kv.keys[layer])
            assert torch.equal(values[0], chunk.kv.values[layer])
        for layer in (1, 4):
            with pytest.raises(ChunkDamagedError, match=f"'v' of layer {layer}") as caught:
                stored.read_layers(layer, layer + 1)
            assert caught.value.key == chunk.key
        with pytest.raises(ChunkDamagedError, match="layer 1"):
            stored.read_layers(0, 5)
    assert store.stats().memory_chunks == 0
    with pytest.warns(FusedKVWarning, match=r"layer 4.*moved to") as record:
        assert store.discard(caught.value.key, caught.value.reason)
    assert len(record) == 1
    # The second one to notice has nothing left to do.
    assert not store.discard(caught.value.key, caught.value.reason)
    assert chunk.open(store) is None


def test_file_shortened_while_open(store, kv_dir, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    path = chunk.path(kv_dir)
    with chunk.open(store) as stored:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ChunkDamagedError, match="layer 2 cannot be read"):
            stored.read_layers(0, 3)
        assert torch.equal(stored.read_layers(0, 2)[1], chunk.kv.values[:2])


def test_damage_after_opening_once_is_noticed(store, kv_dir, make_chunk):
    """The headers that are kept in memory must not hide a changed file."""
    chunk = make_chunk()
    chunk.put(store)
    chunk.open(store).close()
    path = chunk.path(kv_dir)
    raw = path.read_bytes()
    path.write_bytes(raw[:-100])
    assert_moved_away(store, kv_dir, chunk, "bytes")


def test_discarded_chunk_does_not_come_back_into_memory(store, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    with chunk.open(store) as stored:
        stored.read_layers(0, 2)
        with pytest.warns(FusedKVWarning):
            store.discard(chunk.key, "a test")
        stored.read_layers(2, 3)
    assert store.stats().memory_chunks == 0


def test_warning_as_error_leaves_the_store_clean(store, kv_dir, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    truncate_to(9)(chunk.path(kv_dir))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FusedKVWarning):
            chunk.open(store)
    assert store.contains([chunk.key]) == set()
    assert len(quarantined(kv_dir)) == 1


def test_read_only_store_leaves_damage_where_it_is(kv_dir, make_chunk):
    chunk = make_chunk()
    with KVStore(kv_dir) as store:
        chunk.put(store)
    truncate_to(9)(chunk.path(kv_dir))
    with KVStore(kv_dir, read_only=True) as store:
        with pytest.warns(FusedKVWarning, match="read-only") as record:
            assert chunk.open(store) is None
        assert len(record) == 1
        assert chunk.open(store) is None
        assert store.contains([chunk.key]) == set()
        assert store.rows([chunk.key]) == {}
        assert not store.discard(chunk.key, "again")
    assert chunk.path(kv_dir).exists()
    assert quarantined(kv_dir) == []


def test_damage_that_cannot_be_moved_away_is_ignored(store, kv_dir, make_chunk, monkeypatch):
    chunk = make_chunk()
    chunk.put(store)
    truncate_to(9)(chunk.path(kv_dir))

    def refuse(key):
        raise StoreUnavailableError("no")

    with monkeypatch.context() as patch:
        patch.setattr(store._parts.folder, "quarantine", refuse)
        with pytest.warns(FusedKVWarning, match="could not be moved"):
            assert chunk.open(store) is None
    assert chunk.open(store) is None
    assert chunk.put(store) > 0
    assert torch.equal(chunk.open(store).read_layers(0, 3)[0], chunk.kv.keys)


def test_row_that_cannot_be_understood(store, kv_dir, make_chunk):
    chunk, good = make_chunk(1), make_chunk(2)
    chunk.put(store)
    good.put(store)
    with sqlite3.connect(kv_dir / "index.sqlite") as connection:
        connection.execute("UPDATE chunks SET token_ids = x'010203' WHERE key = ?", (chunk.key,))
    connection.close()
    with pytest.warns(FusedKVWarning, match="row"):
        rows = store.rows([chunk.key, good.key])
    assert list(rows) == [good.key]
    assert store.contains([chunk.key]) == set()


FLIPS = 10_000 if os.environ.get("FUSED_KV_STRESS") == "1" else 2_000


@pytest.mark.parametrize(
    ("kv_dtype", "key"),
    [("auto", None), ("int8", None), ("auto", "ab" * 32)],
    ids=["plain", "int8", "encrypted"],
)
def test_thousands_of_flipped_bytes(kv_dir, make_chunk, kv_dtype, key):
    """Any byte of any file, any other value: never a wrong tensor (three of them have as many as all must)."""
    if key is not None:
        pytest.importorskip("cryptography")
    chunks = [make_chunk(seed, layers=4, tokens=6 + seed % 5) for seed in range(40)]
    with KVStore(kv_dir, kv_dtype=kv_dtype, encryption_key=key) as store:
        for chunk in chunks:
            chunk.put(store)
        right = {chunk.key: chunk.open(store).read_layers(0, 4) for chunk in chunks}
    files = {chunk.path(kv_dir): chunk.path(kv_dir).read_bytes() for chunk in chunks}
    rng = random.Random(11)
    flipped = noticed = 0
    while flipped < FLIPS // 3 + 1:
        for path, raw in files.items():
            damaged = bytearray(raw)
            damaged[rng.randrange(len(raw))] ^= rng.randrange(1, 256)
            path.write_bytes(damaged)
            flipped += 1
        # Read-only, so that damaged files stay where they are and the next round needs no put.
        with KVStore(kv_dir, memory_bytes=0, read_only=True, encryption_key=key) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedKVWarning)
            for chunk in chunks:
                stored = chunk.open(store)
                if stored is None:
                    noticed += 1
                    continue
                with stored, contextlib.suppress(ChunkDamagedError):
                    keys, values = stored.read_layers(0, 4)
                    wrong = not (keys.equal(right[chunk.key][0]) and values.equal(right[chunk.key][1]))
                    assert not wrong, f"a wrong tensor of {chunk.key}"
                    noticed -= 1
                noticed += 1
    assert noticed == flipped


def test_input_output_error_while_reading_is_a_damaged_layer(store, kv_dir, make_chunk, monkeypatch):
    """EIO in the middle of a file costs the layers that cannot be read, and nothing else."""
    chunk = make_chunk(layers=4)
    chunk.put(store)
    real, size = os.preadv, chunk.kv.keys[0].nbytes
    start = chunk.path(kv_dir).stat().st_size - 2 * chunk.kv.keys.nbytes

    def broken(fd, buffers, offset):
        if offset <= start + 2 * size < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    with chunk.open(store) as stored:
        with pytest.raises(ChunkDamagedError, match=r"layer 2 cannot be read .*Input/output error"):
            stored.read_layers(0, 4)
        assert stored.read_layers(0, 2)[0].equal(chunk.kv.keys[:2])
        assert stored.read_layers(3, 4)[1].equal(chunk.kv.values[3:])
