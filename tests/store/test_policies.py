"""Replacement policies against a brute-force oracle, alone and inside a store."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store import POLICIES, KVStore
from fused_kv_llm.store.index.policies import Entry, EvictionQueue, RecomputeCost, resolve_policy

# The published formulas, written out once more: entry, clock -> priority.
FORMULAS = {
    "lru": lambda e, clock: e.used,
    "lfu": lambda e, clock: e.hits,
    "gdsf": lambda e, clock: clock + e.hits / e.size,
    "pgdsf": lambda e, clock: clock + e.hits * e.cost / e.size,
    "reuse": lambda e, clock: e.reuse,
}


@dataclass
class Known:
    size: float
    cost: float
    hits: int
    reuse: float
    used: float
    priority: float = 0.0


class Oracle:
    """A list that is searched from one end to the other."""

    def __init__(self, policy):
        self.formula, self.known, self.clock = FORMULAS[policy], {}, 0.0

    def put(self, key, size, cost, used):
        self.known[key] = Known(size, cost, 1, 1.0, used)
        self.known[key].priority = self.formula(self.known[key], self.clock)

    def touch(self, key, used, weight):
        found = self.known[key]
        found.hits, found.reuse, found.used = found.hits + 1, found.reuse + weight, used
        found.priority = self.formula(found, self.clock)

    def pop(self):
        order = sorted((k.priority, k.used, key) for key, k in self.known.items())
        if not order:
            return None
        self.clock = max(self.clock, order[0][0])
        del self.known[order[0][2]]
        return order[0][2]


KEYS = st.sampled_from("abcd")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.integers(1, 9), st.integers(1, 9)),
        st.tuples(st.just("touch"), KEYS, st.sampled_from([0.25, 1.0, 3.0])),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), KEYS),
    ),
    min_size=30,
    max_size=80,
)


@pytest.mark.parametrize("policy", list(POLICIES))
@settings(max_examples=60)
@given(steps=STEPS)
def test_queue_is_the_oracle(policy, steps):
    queue, oracle = EvictionQueue(POLICIES[policy]), Oracle(policy)
    for now, (what, *rest) in enumerate(steps):
        if what == "put":
            key, size, cost = rest
            queue.put(key, Entry(size, cost, used=now))
            oracle.put(key, size, cost, now)
        elif what == "touch" and rest[0] in oracle.known:
            queue.touch(rest[0], now, rest[1])
            oracle.touch(rest[0], now, rest[1])
        elif what == "remove":
            queue.remove(rest[0])
            oracle.known.pop(rest[0], None)
        elif what == "pop":
            assert queue.pop() == oracle.pop()
            assert queue.clock == oracle.clock
        assert len(queue) == len(oracle.known)
    while oracle.known:
        assert queue.pop() == oracle.pop()
    assert queue.pop() is None


def _evicted_by_a_store(kv_dir, make_chunk, policy, oracle):
    """Ask a store and the oracle for the same chunks; a use weighs 1. Return the evicted keys, in order."""
    chunks = {c.key: c for c in (make_chunk(seed, tokens=4 + 3 * (seed % 4)) for seed in range(14))}
    with KVStore(kv_dir.with_name(f"sizes-{policy}")) as store:
        sizes = {key: chunk.put(store) for key, chunk in chunks.items()}
    budget = sum(sorted(sizes.values())[:6])
    evicted, now = [], 0
    with KVStore(kv_dir, disk_bytes=budget, policy=policy, memory_bytes=0) as store:
        for key in random.Random(5).choices(list(chunks), weights=range(1, 15), k=90):
            chunk, now = chunks[key], now + 1
            stored = chunk.open(store)
            assert (stored is not None) == (key in oracle.known)
            if stored is not None:
                stored.close()
                store.stats()  # The index learns of the use.
                oracle.touch(key, now, 1.0)
                continue
            while sum(sizes[k] for k in oracle.known) + sizes[key] > budget:
                evicted.append(oracle.pop())
            oracle.put(key, sizes[key], float(len(chunk.kv.token_ids)), now)
            chunk.put(store)
            assert store.contains(chunks) == set(oracle.known)
        assert store.counters().evicted_disk == len(evicted) > 10
    return evicted


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "reuse"])
def test_the_disk_tier_evicts_as_the_oracle_says(kv_dir, make_chunk, policy):
    _evicted_by_a_store(kv_dir, make_chunk, policy, Oracle(policy))


def test_reuse_is_lfu_in_a_store_that_is_told_no_overhead(kv_dir, make_chunk):
    """Cache-Craft weighs a use by 1/CFO; without one, each use counts one."""
    evicted = _evicted_by_a_store(kv_dir / "lfu", make_chunk, "lfu", Oracle("lfu"))
    assert _evicted_by_a_store(kv_dir / "reuse", make_chunk, "reuse", Oracle("lfu")) == evicted


def test_a_store_that_is_told_overheads_evicts_what_needs_much_recomputation(kv_dir, make_chunk):
    little, much = make_chunk(1, tokens=8), make_chunk(2, tokens=8)
    with KVStore(kv_dir, policy="reuse") as store:
        for chunk in (little, much):
            chunk.put(store)
        for chunk, overhead, uses in ((little, 0.1, 1), (much, 1.0, 3), (little, 0.0, 1)):
            for _ in range(uses):
                chunk.open(store).close()
                store.weigh_use(chunk.key, overhead, 8)
        store.stats()
        reuse = dict(_column(store, "reuse"))
        assert reuse == pytest.approx({little.key: 1 + 8 + 8, much.key: 4})
        assert dict(_column(store, "hits")) == {little.key: 3, much.key: 4}
        assert store._parts.index.ledger.victims(1)[0].key == much.key


def _column(store, name):
    with store._parts.index._database.connection() as connection:
        return connection.execute(f"SELECT key, {name} FROM places").fetchall()


def test_reuse_prefers_what_needs_little_recomputation():
    """Where weights are told: a chunk that is used once with little overhead outlives one that is used twice."""
    queue = {name: EvictionQueue(POLICIES[name]) for name in ("lfu", "reuse")}
    for entries in queue.values():
        for now, key in enumerate(("little overhead", "much overhead")):
            entries.put(key, Entry(1.0, used=now))
        entries.touch("little overhead", 2, 10.0)
        entries.touch("much overhead", 3, 1.25)
        entries.touch("much overhead", 4, 1.25)
    assert queue["lfu"].pop() == "little overhead"
    assert queue["reuse"].pop() == "much overhead"


def test_priorities_are_what_the_papers_say():
    entry = Entry(size=4.0, cost=10.0, hits=3, reuse=2.5, used=17.0)
    clock = 100.0
    assert {name: policy(entry, clock) for name, policy in POLICIES.items()} == {
        "lru": 17.0,
        "lfu": 3.0,
        "gdsf": 100.75,
        "pgdsf": 107.5,
        "reuse": 2.5,
    }
    with pytest.raises(ConfigError, match="lru, lfu, gdsf, pgdsf, reuse"):
        resolve_policy("arc")


@given(
    a=st.floats(0, 5), b=st.floats(0, 5), c=st.floats(0, 5), d=st.floats(0, 5),
    cached=st.floats(0, 5000), new=st.floats(0, 3000),
)  # fmt: skip
def test_recompute_cost_is_bilinear(a, b, c, d, cached, new):
    """Interpolation of a bilinear function gives it back, everywhere."""

    def seconds(x, y):
        return a + b * x / 1000 + c * y / 1000 + d * x * y / 1e6

    xs, ys = [0, 512, 2048, 4096], [1, 128, 1024]
    cost = RecomputeCost(xs, ys, [[seconds(x, y) for y in ys] for x in xs])
    assert math.isclose(cost(cached, new), seconds(cached, new), rel_tol=1e-6, abs_tol=1e-6)


@pytest.mark.parametrize(("xs", "ys", "table"), [([0], [1, 2], [[1, 2]]), ([2, 1], [1, 2], [[1, 2], [3, 4]]),
                                                 ([0, 1], [1, 2], [[1, 2], [3]])])  # fmt: skip
def test_cost_tables_that_cannot_work(xs, ys, table):
    with pytest.raises(ConfigError):
        RecomputeCost(xs, ys, table)
