"""Neighbours that are kept up to date equal those of a search over everything, at the price of the new chunks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.offline.neighbour_file import NeighbourFile
from fused_kv_llm.offline.neighbour_graph import NeighbourGraph, Similarity
from fused_kv_llm.offline.neighbour_index import Near, NeighbourIndex
from fused_kv_llm.offline.vectors import VECTORS_FILE

COUNT = 4


def unit_vectors(number: int, dimensions: int = 16, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((number, dimensions)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


VECTORS = {f"{number:064x}": vector for number, vector in enumerate(unit_vectors(40))}
KEYS = list(VECTORS)


def vectors_of(keys: list[str]) -> np.ndarray:
    return np.stack([VECTORS[key] for key in keys])


def searched(keys: list[str]) -> dict[str, tuple[str, ...]]:
    """All pairs."""
    if not keys:
        return {}
    similarity = np.round(vectors_of(keys) @ vectors_of(keys).T, 6)
    return {
        key: tuple(
            sorted((other for other in keys if other != key), key=lambda o: (-similarity[row, keys.index(o)], o))[
                :COUNT
            ]
        )
        for row, key in enumerate(keys)
    }


@settings(max_examples=60)
@given(steps=st.lists(st.sets(st.sampled_from(KEYS), max_size=20), min_size=1, max_size=6))
def test_whatever_comes_and_goes_the_neighbours_are_those_of_a_search(steps: list[set[str]]) -> None:
    index = NeighbourIndex(COUNT)
    known: dict[str, tuple[str, ...]] = {}
    for step in steps:
        keys = sorted(step, key=lambda key: key[::-1])
        changed, gone = index.update(keys, vectors_of)
        want = searched(keys)
        assert {key: index.near(key).keys for key in keys} == want
        assert gone == known.keys() - step
        assert {key for key in keys if known.get(key) != want[key]} <= changed, "what changed is told"
        known = want


def test_equally_near_chunks_go_by_their_keys() -> None:
    index = NeighbourIndex(2)
    same = np.repeat(unit_vectors(1), 4, axis=0)
    index.update(KEYS[3:0:-1], lambda keys: same[: len(keys)])
    index.update(KEYS[:4], lambda keys: same[: len(keys)])
    assert index.near(KEYS[3]).keys == tuple(KEYS[:2])


def test_a_restored_index_goes_on_where_it_was() -> None:
    first = NeighbourIndex(COUNT)
    first.update(KEYS[:20], vectors_of)
    second = NeighbourIndex(COUNT)
    # As if the last two had been lost: whoever had them as neighbours is searched again.
    second.restore({key: first.near(key) for key in KEYS[:18]}, vectors_of(KEYS[:18]))
    second.update(KEYS[:25], vectors_of)
    assert {key: second.near(key).keys for key in KEYS[:25]} == searched(KEYS[:25])


def test_an_insert_costs_its_own_similarities_only(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, search = [], faiss.knn

    def counting(queries: np.ndarray, vectors: np.ndarray, *rest: object, **named: object) -> object:
        computed.append(len(queries) * len(vectors))
        return search(queries, vectors, *rest, **named)

    monkeypatch.setattr(faiss, "knn", counting)
    many = {f"{number:064x}": vector for number, vector in enumerate(unit_vectors(1010))}
    keys, index = list(many), NeighbourIndex(COUNT)
    index.update(keys[:1000], lambda new: np.stack([many[key] for key in new]))
    assert sum(computed) == 1000**2
    computed.clear()
    index.update(keys, lambda new: np.stack([many[key] for key in new]))
    assert sum(computed) <= 10 * (1010 + 1000)
    computed.clear()
    index.update(keys, vectors_of)
    assert sum(computed) == 0


def test_an_insert_into_twenty_thousand_chunks_is_quick() -> None:
    """Searching all pairs again takes seconds; an insert about 15 ms."""
    many = {f"{number:064x}": vector for number, vector in enumerate(unit_vectors(20_003, 384))}
    keys, index = list(many), NeighbourIndex(9)
    # Whoever they are: each has nine, and a new chunk may be nearer.
    known = {
        key: Near(tuple([keys[(row + step) % 20_000] for step in range(1, 10)]), (1.0,) * 9)
        for row, key in enumerate(keys[:20_000])
    }
    index.restore(known, np.stack(list(many.values())[:20_000]))
    index.update(keys[:20_000], lambda new: np.stack([many[key] for key in new]))
    seconds = []
    for number in range(20_001, 20_004):
        started = time.perf_counter()
        index.update(keys[:number], lambda new: np.stack([many[key] for key in new]))
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.2


class Counting:
    """Embeds the words of the tests above and counts them."""

    name = "counting"

    def __init__(self) -> None:
        self.asked = 0

    def encode(self, texts: list[str]) -> np.ndarray:
        self.asked += len(texts)
        return vectors_of(texts)


def test_a_graph_is_remembered_by_the_next_process(tmp_path: Path) -> None:
    def texts_of(keys: list[str]) -> dict[str, str]:
        return {key: key for key in keys}

    embedder = Counting()
    one = NeighbourGraph("corpus", Similarity(COUNT, embedder, tmp_path))
    one.update(KEYS[:10], texts_of)
    one.give({KEYS[0]: KEYS[5:7]})
    one.preprocessed(KEYS[1], one.neighbours(KEYS[1]))
    one.preprocessed(KEYS[2], KEYS[5:6])
    assert one.stale() == {KEYS[2]}
    one.close()
    two = NeighbourGraph("corpus", Similarity(COUNT, embedder, tmp_path))
    two.update(KEYS[:11], texts_of)
    assert embedder.asked == 11
    assert two.neighbours(KEYS[0]) == tuple(KEYS[5:7])
    assert KEYS[2] in two.stale()
    assert {key: two.neighbours(key) for key in KEYS[1:11]} == {k: searched(KEYS[:11])[k] for k in KEYS[1:11]}
    other = NeighbourGraph("another corpus", Similarity(COUNT, embedder, tmp_path))
    other.update(KEYS[:3], texts_of)
    assert other.neighbours(KEYS[0]) == searched(KEYS[:3])[KEYS[0]]
    assert not other.stale()
    two.close()
    other.close()


def test_nobody_is_waited_for_while_the_graph_is_locked(tmp_path: Path) -> None:
    """Whoever is waited for may want it; also where another process writes meanwhile and vectors are not remembered."""

    def texts_of(keys: list[str]) -> dict[str, str]:
        return {key: key for key in keys}

    graph, other = (NeighbourGraph("corpus", Similarity(COUNT, Counting(), tmp_path)) for _ in range(2))
    graph.update(KEYS[:10], texts_of)
    free: list[bool] = []

    def wait() -> None:
        asking = threading.Thread(target=graph.may_have_neighbours, args=[KEYS[0]], daemon=True)
        asking.start()
        asking.join(5)
        free.append(not asking.is_alive())
        if len(free) == 1:
            other.give({KEYS[20]: KEYS[5:7]})
            (tmp_path / VECTORS_FILE).unlink()

    graph.update(KEYS[:11], texts_of, wait)
    assert free == [True]
    assert graph.neighbours(KEYS[3]) == searched(KEYS[:11])[KEYS[3]]
    graph.close()
    other.close()


def test_a_file_that_cannot_be_used_is_done_without(tmp_path: Path) -> None:
    path = tmp_path / "neighbours.sqlite"
    path.write_bytes(b"not a database, whatever it may be" * 100)
    with pytest.warns(UserWarning, match=r"neighbours\.sqlite"):
        file = NeighbourFile(path)
    file.save_lists("corpus", "given", {KEYS[0]: KEYS[1:3]})
    assert file.lists("corpus", "given") == {}
    assert not file.has_changed()


def test_a_forked_process_has_a_connection_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's must not cross a fork, not even to be closed."""
    file = NeighbourFile(tmp_path / "neighbours.sqlite")
    file.save_lists("corpus", "given", {KEYS[0]: KEYS[1:3]})
    file.has_changed()
    parents = file._connection()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        assert file.has_changed()
        assert file._connection() is not parents
        file.save_lists("corpus", "given", {KEYS[3]: KEYS[4:6]})
        file._connections.pop(-1).close()
    assert file._connection() is parents
    assert file.has_changed()
    assert file.lists("corpus", "given") == {KEYS[0]: tuple(KEYS[1:3]), KEYS[3]: tuple(KEYS[4:6])}
    file.close()
