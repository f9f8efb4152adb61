"""Pinned chunks are not evicted while somebody holds them, and go like others afterwards."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fused_kv_llm.errors import StoreFullError, StoreUnavailableError
from fused_kv_llm.store import KVStore


@pytest.fixture
def chunks(make_chunk):
    return [make_chunk(seed) for seed in range(8)]


@pytest.fixture
def nbytes(tmp_path, chunks):
    with KVStore(tmp_path / "sizes") as store:
        return max(chunk.put(store) for chunk in chunks)


# Steps: store a chunk, pin it for a holder, let a holder go.
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "pin", "unpin"]), st.integers(0, 7), st.sampled_from(["a", "b"])), max_size=24
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_what_is_held_stays_within_any_budget(tmp_path_factory, chunks, nbytes, steps):
    held, stored = {"a": set(), "b": set()}, set()
    with KVStore(tmp_path_factory.mktemp("pins"), disk_bytes=3 * nbytes) as store:
        for what, number, holder in steps:
            key = chunks[number].key
            if what == "pin":
                store.pins.add([key], holder)
                held[holder].add(key)
            elif what == "unpin":
                store.pins.remove(holder)
                held[holder] = set()
            else:
                pinned = (held["a"] | held["b"]) & stored
                if len(pinned) >= 3 and key not in stored:
                    with pytest.raises(StoreFullError, match="pinned"):
                        chunks[number].put(store)
                else:
                    chunks[number].put(store)
                stored = {one.key for one in chunks if store.contains([one.key])}
                assert pinned <= stored
            wanted = [one.key for one in chunks]
            assert store.pins.of(wanted) == held["a"] | held["b"]
            assert store.pins.holders() == {name for name, keys in held.items() if keys}


def test_pins_outlive_the_process_and_do_not_keep_from_deleting(kv_dir, chunks, nbytes):
    with KVStore(kv_dir) as store:
        for chunk in chunks[:4]:
            chunk.put(store)
        store.pins.add([chunks[0].key], "somebody")
    with KVStore(kv_dir) as store:
        with pytest.raises(StoreFullError, match="pinned"):
            store.evict(0)
        assert store.contains([chunk.key for chunk in chunks[:4]]) == {chunks[0].key}
        assert store.delete([chunks[0].key]) == 1
        # It is held again once it is stored again.
        chunks[0].put(store)
        with pytest.raises(StoreFullError, match="pinned"):
            store.evict(0)
        store.pins.remove("somebody")
        assert store.evict(0) == 1


def test_what_pinned_chunks_take(kv_dir, chunks):
    """Each counts once, however many hold it; further ones count as if they were pinned."""
    with KVStore(kv_dir) as store:
        for chunk in chunks[:3]:
            chunk.put(store)
        keys = [chunk.key for chunk in chunks[:4]]
        size = {key: row.nbytes for key, row in store.rows(keys).items()}
        identities = {row.identity for row in store.rows(keys).values()}
        assert store.pins.nbytes(identities) == 0
        # The last one is not stored.
        store.pins.add([keys[0], keys[3]], "somebody")
        store.pins.add(keys[:2], "another")
        assert store.pins.nbytes(identities) == size[keys[0]] + size[keys[1]]
        assert store.pins.nbytes(identities, keys[1:4]) == sum(size.values())
        assert store.pins.nbytes([]) == store.pins.nbytes(["0" * 64], keys) == 0


def test_a_store_that_is_read_only_takes_no_pins(kv_dir, chunks):
    with KVStore(kv_dir) as store:
        chunks[0].put(store)
    with KVStore(kv_dir, read_only=True) as store:
        with pytest.raises(StoreUnavailableError):
            store.pins.add([chunks[0].key], "somebody")
        assert store.pins.of([chunks[0].key]) == set()
