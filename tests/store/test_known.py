"""A file that is as it was when this process read it before is opened without asking the index."""

from __future__ import annotations

import os

import pytest
import torch

from fused_kv_llm.store import KVStore


@pytest.fixture
def asked(diskonly, monkeypatch):
    """The keys that the index was asked for."""
    found, place = [], diskonly._parts.index.ledger.place
    monkeypatch.setattr(diskonly._parts.index.ledger, "place", lambda key: found.append(key) or place(key))
    return found


def load(store, chunk):
    """Return whether the store has the chunk, after comparing its KV."""
    stored = chunk.open(store)
    if stored is None:
        return False
    with stored:
        keys, values = stored.read_layers(0, len(chunk.kv.keys))
    assert torch.equal(keys, chunk.kv.keys)
    assert torch.equal(values, chunk.kv.values)
    return True


def test_the_index_is_asked_once(diskonly, make_chunk, asked):
    chunk = make_chunk()
    chunk.put(diskonly)
    asked.clear()
    assert all(load(diskonly, chunk) for _ in range(3))
    assert asked == [chunk.key]
    assert diskonly.counters().hits["disk"] == 3


def test_another_file_in_its_place_is_asked_for_and_verified(diskonly, kv_dir, make_chunk, asked):
    chunk = make_chunk()
    chunk.put(diskonly)
    load(diskonly, chunk)
    asked.clear()
    path = chunk.path(kv_dir)
    path.with_suffix(".new").write_bytes(path.read_bytes())
    os.replace(path.with_suffix(".new"), path)
    assert load(diskonly, chunk)
    assert asked == [chunk.key]


@pytest.mark.parametrize("how", ["delete", "evict"])
def test_what_another_process_has_taken_away_is_a_miss(diskonly, kv_dir, make_chunk, asked, how):
    chunk = make_chunk()
    chunk.put(diskonly)
    load(diskonly, chunk)
    asked.clear()
    with KVStore(kv_dir) as other:
        other.delete([chunk.key]) if how == "delete" else other.evict(0)
    assert not load(diskonly, chunk)
    assert asked
    assert diskonly.counters().damaged == 0
    chunk.put(diskonly)
    assert load(diskonly, chunk)


def test_what_this_process_has_deleted_is_not_known(diskonly, make_chunk):
    chunk = make_chunk()
    chunk.put(diskonly)
    load(diskonly, chunk)
    diskonly.delete([chunk.key])
    assert diskonly._parts.reader.find(chunk.key) is None
