"""What is put comes back, bit for bit, whoever opens the store and whenever."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import fused_kv_llm.store
from fused_kv_llm.chunk import ChunkKV, ContentHash
from fused_kv_llm.errors import ConfigError, StoreError, StoreUnavailableError
from fused_kv_llm.store import ChunkRow, KVStore

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(store, make_chunk, dtype):
    chunk = make_chunk(1, dtype=dtype)
    # Every bit pattern survives, also those that arithmetic would normalise.
    chunk.kv.keys[0, 0, 0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0], dtype=dtype)
    nbytes = chunk.put(store)
    with chunk.open(store) as stored:
        assert stored.tier == "disk"
        assert (stored.key, stored.identity, stored.dtype) == (chunk.key, chunk.identity, dtype)
        assert (stored.num_layers, stored.num_tokens, stored.position) == (3, 5, 8)
        assert stored.nbytes == chunk.kv.nbytes < nbytes
        keys, values = stored.read_layers(0, 3)
    assert keys.dtype == values.dtype == dtype
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(keys.view(bits), chunk.kv.keys.view(bits))
    assert torch.equal(values.view(bits), chunk.kv.values.view(bits))


def test_survives_restart(kv_dir, make_chunk):
    chunk = make_chunk(2)
    with KVStore(kv_dir) as store:
        chunk.put(store)
    with KVStore(kv_dir) as store:
        assert store.contains([chunk.key, "0" * 64]) == {chunk.key}
        assert torch.equal(chunk.open(store).read_layers(0, 3)[0], chunk.kv.keys)
        assert chunk.put(store) == 0


def test_put_is_idempotent(store, kv_dir, make_chunk):
    chunk = make_chunk(3)
    assert chunk.put(store) == chunk.path(kv_dir).stat().st_size
    before = chunk.path(kv_dir).stat()
    assert chunk.put(store) == 0
    assert chunk.path(kv_dir).stat() == before
    assert store.stats().chunks == 1


def test_put_takes_what_is_not_contiguous(store, make_chunk):
    chunk = make_chunk(4)
    keys = chunk.kv.keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert not keys.is_contiguous()
    kv = ChunkKV(keys.requires_grad_(), chunk.kv.values, chunk.kv.token_ids, 0)
    store.put(chunk.key, chunk.identity, chunk.text, chunk.content, kv)
    assert torch.equal(chunk.open(store).read_layers(0, 3)[0], chunk.kv.keys)


def test_default_device_does_not_matter(store, make_chunk):
    chunk = make_chunk(5)
    chunk.put(store)
    with torch.device("meta"):
        keys, _ = chunk.open(store).read_layers(0, 3)
    assert torch.equal(keys, chunk.kv.keys)


def test_file_is_plain_safetensors_and_describes_itself(store, kv_dir, make_chunk):
    chunk = make_chunk(6, dtype=torch.bfloat16)
    chunk.put(store)
    with safe_open(chunk.path(kv_dir), "pt") as file:
        assert torch.equal(file.get_tensor("k"), chunk.kv.keys)
        assert torch.equal(file.get_tensor("v"), chunk.kv.values)
        metadata = file.metadata()
    # Everything that an index needs to be rebuilt.
    assert (metadata["key"], metadata["identity"]) == (chunk.key, chunk.identity)
    about = json.loads(metadata["private"])["about"]
    assert about["text"] == chunk.text
    assert tuple(about["token_ids"]) == chunk.kv.token_ids
    assert ContentHash(*about["content"]) == chunk.content
    assert about["position"] == chunk.kv.position
    raw = chunk.path(kv_dir).read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 64 == 0


def test_long_text_is_read_whole(store, make_chunk):
    chunk = make_chunk(7)
    text = "x" * 200_000
    store.put(chunk.key, chunk.identity, text, chunk.content, chunk.kv)
    assert store.rows([chunk.key])[chunk.key].text == text
    assert torch.equal(chunk.open(store).read_layers(0, 3)[0], chunk.kv.keys)


def test_rows(store, kv_dir, make_chunk):
    chunks = [make_chunk(seed) for seed in range(1, 4)]
    for chunk in chunks:
        chunk.put(store)
    rows = store.rows([chunks[0].key, chunks[2].key, "f" * 64])
    assert set(rows) == {chunks[0].key, chunks[2].key}
    assert rows[chunks[2].key] == ChunkRow(
        chunks[2].key,
        chunks[2].identity,
        chunks[2].text,
        chunks[2].kv.token_ids,
        10,
        chunks[2].path(kv_dir).stat().st_size,
    )


def test_rows_of_more_keys_than_one_statement_takes(store, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    keys = [f"{i:064x}" for i in range(1234)]
    assert store.contains([*keys, chunk.key]) == {chunk.key}
    assert list(store.rows([*keys, chunk.key])) == [chunk.key]


def test_content_hashes_are_incremental(store, make_chunk):
    first, second, other = make_chunk(1), make_chunk(2), make_chunk(3, model="model-b")
    assert store.keys(first.identity) == []
    assert list(store.content_hashes(first.identity)) == []
    first.put(store)
    other.put(store)
    (rows,) = store.content_hashes(first.identity)
    assert store.keys(first.identity) == [first.key]
    assert [array.dtype for array in rows] == [np.int64, np.uint64, np.uint64, np.int64]
    hashes = int(rows.prefix[0]), int(rows.full[0]), int(rows.length[0])
    assert ContentHash(*hashes) == first.content
    last = int(rows.rowid[-1])
    second.put(store)
    (rows,) = store.content_hashes(first.identity, last)
    assert store.keys(first.identity, last) == [second.key]
    assert rows.rowid[0] > last
    assert list(store.content_hashes(first.identity, int(rows.rowid[-1]))) == []


def test_deleted_chunk_comes_back_with_a_new_rowid(store, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    last = int(next(store.content_hashes(chunk.identity)).rowid[-1])
    assert store.delete([chunk.key, "0" * 64]) == 1
    assert store.delete([chunk.key]) == 0
    assert chunk.open(store) is None
    chunk.put(store)
    assert store.keys(chunk.identity, last) == [chunk.key]


def test_delete_removes_file_and_memory(store, kv_dir, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    kept = chunk.open(store)
    keys, _ = kept.read_layers(0, 3)
    assert store.stats().memory_chunks == 1
    store.delete([chunk.key])
    assert not chunk.path(kv_dir).exists()
    assert store.stats().memory_chunks == 0
    assert chunk.open(store) is None
    # What somebody is using stays what it was.
    assert torch.equal(keys, chunk.kv.keys)


def test_stats(store, make_chunk):
    chunks = [make_chunk(1), make_chunk(2, tokens=9), make_chunk(3, model="model-b")]
    nbytes = sum(chunk.put(store) for chunk in chunks)
    chunks[0].open(store).read_layers(0, 3)
    stats = store.stats()
    assert (stats.chunks, stats.tokens, stats.bytes_on_disk) == (3, 19, nbytes)
    assert (stats.memory_chunks, stats.memory_bytes) == (1, chunks[0].kv.nbytes)
    assert stats.by_identity == {chunks[0].identity: 2, chunks[2].identity: 1}
    assert store.free_bytes() > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_ids": (1, 2)}, "2 token ids"),
        ({"token_ids": (1, 2, 3, 4, -1)}, "-1"),
        ({"token_ids": (1, 2, 3, 4, 2**31)}, "2147483648"),
        ({"position": -1}, "-1"),
        ({"values": torch.zeros(3, 2, 4, 8)}, r"\[3, 2, 4, 8\]"),
        ({"values": torch.zeros(3, 2, 5, 8).half()}, "float16"),
        ({"keys": torch.zeros(3, 2, 5, 8).double(), "values": torch.zeros(3, 2, 5, 8).double()}, "float64"),
        ({"keys": torch.zeros(0, 2, 5, 8), "values": torch.zeros(0, 2, 5, 8)}, "empty"),
    ],
)
def test_put_refuses_kv_that_cannot_be_right(store, make_chunk, change, says):
    chunk = make_chunk()
    fields = {
        "keys": chunk.kv.keys,
        "values": chunk.kv.values,
        "token_ids": chunk.kv.token_ids,
        "position": 0,
    }
    with pytest.raises(ConfigError, match=says):
        store.put(chunk.key, chunk.identity, chunk.text, chunk.content, ChunkKV(**{**fields, **change}))
    assert store.stats().chunks == 0


@pytest.mark.parametrize("text", [b"bytes", "lone \ud800 surrogate"])
def test_put_refuses_what_is_not_text(store, make_chunk, text):
    chunk = make_chunk()
    with pytest.raises(ConfigError, match="text"):
        store.put(chunk.key, chunk.identity, text, chunk.content, chunk.kv)


def test_put_refuses_hashes_that_are_too_large(store, make_chunk):
    chunk = make_chunk()
    with pytest.raises(ConfigError, match="64-bit"):
        store.put(chunk.key, chunk.identity, chunk.text, ContentHash(1 << 64, 0, 3), chunk.kv)


@pytest.mark.parametrize("key", ["../../etc/passwd", "a" * 63, "A" * 64, "g" * 64, "a" * 64 + "\n", "", 7])
def test_every_method_refuses_a_key_that_is_no_key(store, make_chunk, key):
    chunk = make_chunk()
    calls = [
        lambda: store.open(key, [1]),
        lambda: store.put(key, chunk.identity, chunk.text, chunk.content, chunk.kv),
        lambda: store.contains([key]),
        lambda: store.rows([key]),
        lambda: store.delete([key]),
        lambda: store.discard(key, "why"),
        lambda: store.prefetch([key]),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="64 hexadecimal"):
            call()


def test_closed_store_says_so(kv_dir, make_chunk):
    store = KVStore(kv_dir)
    chunk = make_chunk()
    chunk.put(store)
    stored = chunk.open(store)
    store.close()
    store.close()
    for call in (
        lambda: chunk.open(store),
        lambda: chunk.put(store),
        store.stats,
        lambda: store.prefetch([]),
    ):
        with pytest.raises(StoreUnavailableError, match="closed"):
            call()
    # A chunk that was open stays readable.
    assert torch.equal(stored.read_layers(0, 3)[1], chunk.kv.values)
    stored.close()
    stored.close()
    with pytest.raises(StoreError, match="closed"):
        stored.read_layers(0, 1)


def test_read_only(kv_dir, make_chunk):
    chunk, other = make_chunk(1), make_chunk(2)
    with pytest.raises(StoreUnavailableError, match="read-only"):
        KVStore(kv_dir, read_only=True)
    assert not kv_dir.exists()
    with KVStore(kv_dir) as writer:
        chunk.put(writer)
        with KVStore(kv_dir, read_only=True) as reader:
            assert torch.equal(chunk.open(reader).read_layers(0, 3)[0], chunk.kv.keys)
            other.put(writer)
            assert reader.contains([other.key]) == {other.key}
            with pytest.raises(StoreUnavailableError, match="read_only"):
                chunk.put(reader)
            with pytest.raises(StoreUnavailableError, match="read_only"):
                reader.delete([chunk.key])
    with KVStore(kv_dir, read_only=True) as reader:
        assert set(reader.rows([chunk.key, other.key])) == {chunk.key, other.key}


def test_room_never_unpickles():
    for path in Path(fused_kv_llm.store.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & {"pickle", "marshal", "shelve", "dill", "joblib"}, path
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & {"torch.load", "torch.save", "np.load", "np.save"}, path
