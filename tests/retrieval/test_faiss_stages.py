"""A search in stages ends with what the ordinary search finds."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.retrieval import FaissStages, QuickFirst, StagedSearch, faiss_stages, last_of

DIM = 16
VECTORS = np.random.default_rng(5).normal(size=(3000, DIM)).astype(np.float32)
FACTORIES = ["IVF40,Flat", "IVF40,SQ8", "IVF40,PQ8x4", "HNSW16,Flat", "Flat"]


def made(factory: str, metric: int = faiss.METRIC_L2, count: int = 3000) -> Any:
    index = faiss.index_factory(DIM, factory, metric)
    index.train(VECTORS)
    index.add(VECTORS[:count])
    return index


@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
@pytest.mark.parametrize("factory", FACTORIES)
def test_the_last_stage_is_the_ordinary_search(factory: str, metric: int) -> None:
    index = made(factory, metric)

    @settings(max_examples=25)
    @given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 6), st.integers(1, 60))
    def check(seed: int, k: int, stages: int, effort: int) -> None:
        if factory.startswith("IVF"):
            index.nprobe = effort
        elif factory.startswith("HNSW"):
            index.hnsw.efSearch = effort
        query = np.random.default_rng(seed).normal(size=DIM).astype(np.float32)
        want, want_ids = index.search(query[None], k)
        found = list(FaissStages(index, stages).search(query, k))
        assert 1 <= len(found) <= stages
        np.testing.assert_array_equal(found[-1][0], want[0])
        np.testing.assert_array_equal(found[-1][1], want_ids[0])

    check()


def test_clusters_are_searched_in_the_order_of_their_distance_and_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    index, seen = made("IVF40,Flat"), list[int]()
    index.nprobe = 24
    search = faiss_stages._in_clusters

    def counted(index: Any, query: Any, k: int, clusters: Any, near: Any) -> Any:
        seen.extend(clusters[0])
        return search(index, query, k, clusters, near)

    monkeypatch.setattr(faiss_stages, "_in_clusters", counted)
    sizes = [int((ids >= 0).sum()) for _, ids in FaissStages(index).search(VECTORS[7], 5)]
    assert seen == list(index.quantizer.search(VECTORS[7:8], 24)[1][0])
    assert len(sizes) == 4


def test_provisional_results_are_mostly_the_final_ones() -> None:
    index = made("IVF40,Flat")
    index.nprobe = 32
    found = [[set(ids) for _, ids in FaissStages(index).search(vector, 3)] for vector in VECTORS[:50] + 0.01]
    agree = np.mean([[stage == one[-1] for stage in one] for one in found], axis=0)
    assert agree[-1] == 1.0
    # Otherwise there was nothing to speculate on.
    assert 0.05 < agree[0] <= agree[1] <= agree[2] < 1.0


def test_fewer_neighbours_than_wanted_are_marked() -> None:
    index = made("IVF40,Flat", count=3)
    index.nprobe = 40
    *_, (_, ids) = FaissStages(index).search(VECTORS[0], 5)
    assert sorted(ids) == [-1, -1, 0, 1, 2]
    assert list(ids[3:]) == [-1, -1]


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ConfigError, match="no faiss index"):
        FaissStages(object())
    with pytest.raises(ConfigError, match="stages=0"):
        FaissStages(made("Flat"), 0)
    with pytest.raises(ConfigError, match="3 dimensions, the index 16"):
        next(FaissStages(made("Flat")).search([1.0, 2.0, 3.0], 1))


def test_a_quick_search_that_fails_is_passed_over() -> None:
    def broken(query: str) -> list[str]:
        raise OSError("no copy here")

    search = QuickFirst(broken, lambda query: [query])
    assert isinstance(search, StagedSearch)
    assert list(search.stages("a")) == [["a"]]
    with pytest.raises(OSError, match="no copy here"):
        list(QuickFirst(lambda query: ["b"], broken).stages("a"))


def test_a_search_without_stages_is_refused() -> None:
    assert last_of(iter([[1], [2]])) == [2]
    with pytest.raises(ConfigError, match="at least once"):
        last_of(iter([]))
