"""Where requests go: residence, load, rendezvous hashing, and what a lost or a new replica changes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.scale.placement import Held, Part, Placement, PlacementOptions, RoutingKey, rendezvous_weight

KEYS = st.integers(0, 2**64 - 1)
PARTS = st.lists(st.builds(Part, KEYS, st.integers(1, 5000)), max_size=8, unique_by=lambda part: part.key)
LOADS = st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 40).map(float), min_size=1, max_size=12)


def routing_key(chunks: list[Part], prefixes: list[Part] | None = None) -> RoutingKey:
    size = sum(part.size for part in chunks) + sum(part.size for part in (prefixes or [])[:1])
    return RoutingKey(size, tuple(chunks), tuple(prefixes or ()))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(PARTS, PARTS, LOADS, st.data())
def test_every_replica_is_ranked_once(
    chunks: list[Part], prefixes: list[Part], loads: dict[str, float], data: st.DataObject
) -> None:
    placement = Placement(seed=0)
    for name in loads:
        held = data.draw(st.sets(st.sampled_from([part.key for part in chunks]))) if chunks else set()
        placement.update(name, Held(frozenset(held)))
    assert sorted(placement.rank(routing_key(chunks, prefixes), loads)) == sorted(loads)


@given(PARTS.filter(bool), LOADS, st.data())
def test_all_else_equal_a_request_goes_where_most_of_it_is(
    chunks: list[Part], loads: dict[str, float], data: st.DataObject
) -> None:
    placement, key = Placement(PlacementOptions(cold_credit=0.0)), routing_key(chunks)
    even = dict.fromkeys(loads, 3.0)
    for name in loads:
        held = data.draw(st.sets(st.sampled_from([part.key for part in chunks])))
        placement.update(name, Held(frozenset(held)))
    best = placement.rank(key, even)[0]
    assert placement.resident(best, key) == max(placement.resident(name, key) for name in loads)


@given(PARTS, LOADS)
def test_an_unbalanced_choice_goes_to_a_replica_with_less_to_do(chunks: list[Part], loads: dict[str, float]) -> None:
    placement, key = Placement(PlacementOptions(load_weight=0.0, imbalance=4.0), seed=1), routing_key(chunks)
    busiest = max(loads, key=lambda name: loads[name])
    placement.update(busiest, Held(frozenset(part.key for part in chunks)))
    first = placement.rank(key, loads)[0]
    calm = Placement(PlacementOptions(load_weight=0.0, imbalance=1e9))
    calm.update(busiest, Held(frozenset(part.key for part in chunks)))
    wanted = calm.rank(key, loads)[0]
    if loads[wanted] - min(loads.values()) > 4.0 and chunks:
        assert loads[first] < loads[wanted]
    elif chunks:
        assert first == wanted


@given(st.lists(KEYS, min_size=1, max_size=50, unique=True), st.sets(st.text(min_size=1), min_size=2, max_size=10))
def test_a_replica_that_leaves_takes_only_its_own_cold_chunks_with_it(keys: list[int], names: set[str]) -> None:
    def homes(among: set[str]) -> dict[int, str]:
        placement = Placement()
        return {key: placement.rank(routing_key([Part(key, 1)]), dict.fromkeys(sorted(among), 0.0))[0] for key in keys}

    before, gone = homes(names), min(names)
    after = homes(names - {gone})
    assert all(after[key] == home for key, home in before.items() if home != gone)


def test_cold_chunks_are_shared_out_evenly() -> None:
    names = [f"replica-{number}" for number in range(8)]
    homes = Counter(max(names, key=lambda name: rendezvous_weight(key * 2654435761, name)) for key in range(8000))
    assert len(homes) == 8
    assert max(homes.values()) < 1.2 * 1000 < 1.4 * min(homes.values())


def test_the_same_cold_chunk_goes_to_the_same_replica_from_every_router() -> None:
    loads = {"a": 0.0, "b": 0.0, "c": 0.0}
    keys = [routing_key([Part(number * 7919, 100)]) for number in range(50)]
    one, other = Placement(seed=1), Placement(seed=2)
    assert [one.rank(key, loads)[0] for key in keys] == [other.rank(key, loads)[0] for key in keys]
    assert {one.rank(key, loads)[0] for key in keys} == set(loads)


def test_a_resident_chunk_counts_more_than_a_cold_one() -> None:
    names = ["a", "b"]
    cold = next(key for key in range(100) if max(names, key=lambda name: rendezvous_weight(key, name)) == "a")
    placement = Placement()
    placement.update("b", Held(frozenset({10**6})))
    key = routing_key([Part(cold, 100), Part(10**6, 90)])
    assert placement.rank(key, dict.fromkeys(names, 0.0))[0] == "b"
    assert Placement().rank(routing_key([Part(cold, 100)]), dict.fromkeys(names, 0.0))[0] == "a"


def test_load_outweighs_a_small_residence_and_not_a_large_one() -> None:
    placement = Placement(PlacementOptions(load_weight=0.05))
    placement.update("a", Held(frozenset({1})))
    small, large = RoutingKey(1000, (Part(1, 100),)), RoutingKey(1000, (Part(1, 900),))
    loads = {"a": 4.0, "b": 0.0}
    assert placement.rank(small, loads) == ["b", "a"]
    assert placement.rank(large, loads) == ["a", "b"]


def test_a_conversation_goes_on_where_it_was_by_its_longest_known_part() -> None:
    placement = Placement()
    placement.update("a", Held(prefixes=frozenset({1})))
    placement.update("b", Held(prefixes=frozenset({1, 2})))
    key = RoutingKey(300, (), (Part(3, 300), Part(2, 200), Part(1, 100)))
    assert placement.rank(key, {"a": 0.0, "b": 0.0})[0] == "b"
    assert placement.resident("b", key) == 200
    assert placement.resident("a", key) == 100


def test_what_was_sent_is_believed_until_it_has_settled() -> None:
    clock = Clock()
    placement = Placement(PlacementOptions(settle_s=5.0), now_s=clock)
    key = RoutingKey(500, (Part(1, 100),), (Part(9, 500), Part(8, 400)))
    placement.routed("a", key)
    placement.update("a", Held())
    assert placement.resident("a", RoutingKey(500, (Part(1, 100),))) == 100
    # The prompt itself is held from then on, and nothing is known of what it began with.
    assert placement.resident("a", RoutingKey(900, (), (Part(10, 900), Part(9, 500)))) == 500
    assert placement.resident("a", RoutingKey(900, (), (Part(10, 900), Part(8, 400)))) == 0
    clock.now_s = 6.0
    assert placement.resident("a", key) == 0


def test_replicas_that_are_gone_are_forgotten() -> None:
    placement, key = Placement(), RoutingKey(100, (Part(1, 100),))
    placement.update("a", Held(frozenset({1})))
    placement.routed("a", key)
    placement.keep({"b"})
    assert placement.resident("a", key) == 0


def test_a_chunk_that_stands_twice_counts_once_and_never_more_than_the_prompt() -> None:
    placement = Placement()
    placement.update("a", Held(frozenset({1}), frozenset({2})))
    assert placement.resident("a", RoutingKey(250, (Part(1, 100), Part(1, 100)))) == 100
    assert placement.resident("a", RoutingKey(250, (Part(1, 100),), (Part(2, 200),))) == 250


def test_without_replicas_there_is_no_rank() -> None:
    assert Placement().rank(RoutingKey(0), {}) == []


@pytest.mark.parametrize(
    "options", [{"load_weight": -1.0}, {"imbalance": float("nan")}, {"cold_credit": 1.5}, {"settle_s": float("inf")}]
)
def test_options_that_cannot_work_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PlacementOptions(**options)
