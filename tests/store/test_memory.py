"""The memory tier keeps what was read completely, within its budget, least recently used out first."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.errors import ConfigError, FusedKVWarning
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.folder import FileVersion
from fused_kv_llm.store.format import FileHeader, Part, file_name
from fused_kv_llm.store.index.policies import POLICIES
from fused_kv_llm.store.read import MemoryTier, ResidentFile

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


def resident(name: str, tokens: int) -> ResidentFile:
    shape = (1, 1, tokens, 1)
    parts = tuple(Part(part, torch.float32, shape, 0, ("",)) for part in "kv")
    header = FileHeader(key=name * 64, parts=parts)
    return ResidentFile(FileVersion(0, 0, 0, 0), header, {part: torch.zeros(shape) for part in "kv"})


def test_chunk_is_promoted_when_all_layers_were_read_and_not_copied(store, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    with chunk.open(store) as stored:
        first, _ = stored.read_layers(0, 1)
        assert store.stats().memory_chunks == 0
        stored.read_layers(1, 3)
    assert store.stats().memory_bytes == chunk.kv.nbytes
    with chunk.open(store) as stored:
        assert stored.tier == "memory"
        assert (stored.num_layers, stored.num_tokens, stored.position) == (3, 5, 7)
        keys, values = stored.read_layers(0, 3)
    assert keys.data_ptr() == first.data_ptr()
    assert torch.equal(keys, chunk.kv.keys)
    assert torch.equal(values, chunk.kv.values)


def test_what_is_read_in_passing_is_not_kept(kv_dir, make_chunk):
    held, passing, wanted = (make_chunk(seed=seed) for seed in range(3))
    with KVStore(kv_dir, memory_bytes=2 * held.kv.nbytes) as store:
        for chunk in (held, passing, wanted):
            chunk.put(store)

        def pass_by(chunk):
            with store.open(chunk.key, chunk.kv.token_ids, keeps=False) as stored:
                keys, values = stored.read_layers(0, 3)
            assert torch.equal(keys, chunk.kv.keys)
            assert torch.equal(values, chunk.kv.values)

        held.open(store).read_layers(0, 3)
        pass_by(passing)
        assert store.resident().keys() == {held.key}, "even where there is room"
        wanted.open(store).read_layers(0, 3)
        pass_by(held)
        passing.open(store).read_layers(0, 3)
        assert store.resident().keys() == {wanted.key, passing.key}, "reading in passing is no use"


def test_a_reader_who_joins_has_a_chunk_kept(kv_dir, make_chunk):
    held, chunk = make_chunk(seed=1), make_chunk()
    with KVStore(kv_dir, memory_bytes=held.kv.nbytes) as store:
        for one in (held, chunk):
            one.put(store)
        held.open(store).read_layers(0, 3)
        with store.open(chunk.key, chunk.kv.token_ids, keeps=False) as passing:
            passing.read_layers(0, 1)
            with chunk.open(store) as joined:
                joined.read_layers(1, 3)
        assert store.resident().keys() == {chunk.key}


def test_a_reader_whom_another_overtakes_has_a_chunk_kept(kv_dir, make_chunk, monkeypatch):
    """It opens the file, finds that somebody who keeps nothing reads it by now, and joins."""
    chunk, passing = make_chunk(), []
    with KVStore(kv_dir, memory_bytes=chunk.kv.nbytes) as store:
        chunk.put(store)
        folder = store._parts.reader._folder
        open_file = folder.open_file

        def overtaken(*names):
            monkeypatch.undo()
            passing.append(store.open(chunk.key, chunk.kv.token_ids, keeps=False))
            return open_file(*names)

        monkeypatch.setattr(folder, "open_file", overtaken)
        with chunk.open(store) as joined:
            joined.read_layers(0, 3)
        passing.pop().close()
        assert store.resident().keys() == {chunk.key}


def test_memory_hit_opens_no_file(store, make_chunk, monkeypatch):
    chunk = make_chunk()
    chunk.put(store)
    chunk.open(store).read_layers(0, 3)

    def refuse(*_, **__):
        raise AssertionError("a file was opened")

    monkeypatch.setattr(os, "open", refuse)
    assert torch.equal(chunk.open(store).read_layers(1, 2)[0], chunk.kv.keys[1:2])


def test_a_file_that_is_gone_is_not_served_from_memory(store, kv_dir, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    chunk.open(store).read_layers(0, 3)
    chunk.path(kv_dir).unlink()
    with pytest.warns(FusedKVWarning, match="vanished"):
        assert chunk.open(store) is None
    assert store.stats().memory_bytes == 0


def test_drop_memory(store, make_chunk):
    chunk = make_chunk()
    chunk.put(store)
    pending = chunk.open(store)
    pending.read_layers(0, 2)
    store.drop_memory()
    pending.read_layers(2, 3)
    assert store.stats().memory_chunks == 0
    assert chunk.open(store).tier == "disk"


def test_least_recently_used_goes_first(kv_dir, make_chunk):
    chunks = [make_chunk(seed) for seed in range(3)]
    with KVStore(kv_dir, memory_bytes=2 * chunks[0].kv.nbytes) as store:
        for chunk in chunks:
            chunk.put(store)
        for chunk in (*chunks[:2], chunks[0], chunks[2]):
            chunk.open(store).read_layers(0, 3)
        assert [chunk.open(store).tier for chunk in chunks] == ["memory", "disk", "memory"]


def test_evicted_chunk_lives_on_while_it_is_used(kv_dir, make_chunk):
    one, two = make_chunk(1), make_chunk(2)
    with KVStore(kv_dir, memory_bytes=one.kv.nbytes) as store:
        one.put(store)
        two.put(store)
        stored = one.open(store)
        stored.read_layers(0, 3)
        two.open(store).read_layers(0, 3)
        assert one.open(store).tier == "disk"
        assert torch.equal(stored.read_layers(0, 3)[0], one.kv.keys)


@pytest.mark.parametrize("budget", [0, 1])
def test_budget_too_small_disables_the_tier(kv_dir, make_chunk, budget):
    chunk = make_chunk()
    with KVStore(kv_dir, memory_bytes=budget) as store:
        chunk.put(store)
        for _ in range(2):
            with chunk.open(store) as stored:
                assert stored.tier == "disk"
                assert torch.equal(stored.read_layers(0, 3)[0], chunk.kv.keys)
        assert store.stats().memory_bytes == 0


def test_negative_budget(kv_dir):
    with pytest.raises(ConfigError, match="-1"):
        KVStore(kv_dir, memory_bytes=-1)
    assert not kv_dir.exists()


@given(
    budget=st.integers(0, 200),
    steps=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 12), st.booleans()), max_size=40),
)
def test_tier_behaves_like_a_list_ordered_by_use(budget, steps):
    tier = MemoryTier(budget, POLICIES["lru"])
    model: list[tuple[str, int]] = []
    for name, tokens, is_put in steps:
        nbytes = 8 * tokens
        if is_put:
            taken = tier.put(resident(name, tokens))
            assert taken == (nbytes <= budget)
            if taken:
                model = [entry for entry in model if entry[0] != name]
                while sum(size for _, size in model) + nbytes > budget:
                    model.pop(0)
                model.append((name, nbytes))
        else:
            entry = next((entry for entry in model if entry[0] == name), None)
            assert (tier.get(file_name(name * 64)) is not None) == (entry is not None)
            if entry is not None:
                model.remove(entry)
                model.append(entry)
        assert tier.usage() == (len(model), sum(size for _, size in model))
        assert tier.usage()[1] <= budget


def test_budget_holds_under_threads():
    tier = MemoryTier(400, POLICIES["lru"])

    def work(seed: int) -> bool:
        rng = random.Random(seed)
        within = True
        for _ in range(300):
            name = rng.choice("abcdef01")
            action = rng.random()
            if action < 0.6:
                tier.put(resident(name, rng.randint(1, 20)))
            elif action < 0.8:
                tier.discard(file_name(name * 64))
            else:
                tier.get(file_name(name * 64))
            within = within and tier.usage()[1] <= 400
        return within

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    tier.clear()
    assert tier.usage() == (0, 0)
