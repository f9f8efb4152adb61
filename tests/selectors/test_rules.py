"""Each published rule against its formula, transcribed with plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from probes import make_probe

from fused_kv_llm.errors import ConfigError, FusedKVError
from fused_kv_llm.selectors import CacheCraftOnline, FirstLayersView, KVDeviation, Probe, resolve_selector
from fused_kv_llm.selectors.budget import allocate, top_positions
from fused_kv_llm.selectors.cache_craft import adjusted_overlap
from fused_kv_llm.selectors.cache_craft_online import context_impact
from fused_kv_llm.selectors.focus import focused_chunks, is_settled


def test_cacheblend_takes_the_highest_deviation_and_kvshare_scales_it() -> None:
    probe = make_probe([6, 5])
    assert probe.deviation is not None
    assert probe.received is not None
    want = sorted(probe.positions[probe.deviation.topk(4).indices].tolist())
    assert resolve_selector("cacheblend").select(probe, 4).tolist() == want
    want = sorted(probe.positions[(probe.deviation * probe.received).topk(4).indices].tolist())
    assert resolve_selector("kvshare").select(probe, 4).tolist() == want


def test_narrowing_skips_the_layers_that_a_model_does_not_have() -> None:
    assert KVDeviation("x").view(30) == FirstLayersView(deviation=(1, 2, 3), keep=(1.5, 1.25, 1.0))
    assert KVDeviation("x").view(2) == FirstLayersView(deviation=(1,), keep=(1.0,))
    assert KVDeviation("x").view(30).layers == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match="at least one"):
        FirstLayersView()
    assert FirstLayersView(focus_window=3).layers == (), "what was selected before begins, and only the focus counts"


def test_heavy_hitters_give_every_chunk_its_part() -> None:
    probe = make_probe([20, 10])
    assert probe.received_within is not None
    want = [
        *probe.positions[:20][probe.received_within[:20].topk(8).indices].tolist(),
        *probe.positions[20:][probe.received_within[20:].topk(4).indices].tolist(),
    ]
    assert resolve_selector("prefill_h2o").select(probe, 12).tolist() == sorted(want)


def test_cache_craft_follows_equations_9_to_14() -> None:
    probe = make_probe([8, 12, 10])
    assert probe.given is not None
    sizes, weight = [8, 12, 10], [0.0, 0.0, 0.0]
    for i in range(3):
        mine = [t for t in range(30) if int(probe.chunk_index[t]) == i]
        a = sum(sum(float(probe.given[t, j]) for t in mine) / (sizes[i] * sizes[j]) for j in range(i))
        b = sum(float(probe.given[t, i]) for t in mine) / sizes[i] ** 2
        cci = 1 / (1 + math.exp(-a / b))
        assert float(context_impact(probe.given, probe.chunk_index)[i]) == pytest.approx(cci)
        weight[i] = cci * sizes[i] if i else 0.0
    chosen = CacheCraftOnline().select(probe, 9)
    taken = [sum(int(probe.chunk_index[probe.positions == p]) == i for p in chosen.tolist()) for i in range(3)]
    assert taken[0] == 0
    assert taken[1] == pytest.approx(9 * weight[1] / (weight[1] + weight[2]), abs=1)
    for i in (1, 2):
        inter = {
            int(probe.positions[t]): sum(float(probe.given[t, j]) for j in range(i))
            for t in range(30)
            if int(probe.chunk_index[t]) == i
        }
        best = sorted(sorted(inter, key=lambda p: -inter[p])[: taken[i]])
        assert [p for p in chosen.tolist() if p in inter] == best


def test_alpha_asks_for_a_share_of_every_chunk() -> None:
    probe = make_probe([8, 12, 10])
    assert probe.given is not None
    impact = context_impact(probe.given, probe.chunk_index)
    few = CacheCraftOnline(alpha=0.1).select(probe, 20)
    assert few.shape[0] == math.ceil(0.1 * float(impact[1]) * 12) + math.ceil(0.1 * float(impact[2]) * 10)
    assert CacheCraftOnline(alpha=50.0).select(probe, 20).shape[0] == 20


def test_adjusted_overlap_of_equations_6_to_8() -> None:
    assert adjusted_overlap([3.0, 1.0], ["a", "b"], ["a", "b"]) == 1.0
    assert adjusted_overlap([3.0, 1.0], ["a", "b"], ["x", "a"]) == 0.75
    # All pairs stand the other way round: gamma is 1. One of three: 1/3.
    assert adjusted_overlap([3.0, 1.0], ["a", "b"], ["b", "a"]) == 0.0
    assert adjusted_overlap([1.0, 1.0, 2.0], ["a", "b", "c"], ["b", "a", "c"]) == pytest.approx(1 - 1 / 3)
    assert adjusted_overlap([], [], []) == 1.0
    assert adjusted_overlap([], [], ["a"]) == 0.0


def _algorithm_1(scores: list[float]) -> set[int]:
    """Return F of lines 4 to 9, with the paper's indices from 1 to k."""
    k, order = len(scores), sorted(range(len(scores)), key=lambda chunk: -scores[chunk])
    ordered = {i: scores[order[i - 1]] for i in range(1, k + 1)}
    diff = {i: ordered[i] - ordered[i + 1] for i in range(1, k)}
    p = {i: diff[i] / sum(diff.values()) for i in range(1, k)}
    h = {i: -sum(p[j] * math.log(p[j]) for j in range(1, i + 1)) for i in range(1, k)}
    star, *others = sorted(range(1, k - 1), key=lambda i: h[i] - h[i + 1])
    # Of two that are equal, rounding decides.
    assume(all(h[star + 1] - h[star] > h[i + 1] - h[i] + 1e-9 for i in others))
    return set(order[:star])


@settings(max_examples=100)
@given(gaps=st.lists(st.integers(1, 50), min_size=2, max_size=7), data=st.data())
def test_focus_is_algorithm_1(gaps: list[int], data: st.DataObject) -> None:
    scores = data.draw(st.permutations([float(sum(gaps[:i])) for i in range(len(gaps) + 1)]))
    assert focused_chunks(torch.tensor(scores, dtype=torch.float64)) == _algorithm_1(scores)


def test_focus_keeps_as_many_chunks_as_algorithm_1_counts() -> None:
    # Sorted, the gaps are 0.1, 3.0, 0.2 and 0.7. The fourth adds most to the entropy, so i* is 3.
    assert focused_chunks(torch.tensor([0.0, 4.0, 0.7, 3.9, 0.9])) == {1, 3, 4}
    # One chunk stands out from two others.
    assert focused_chunks(torch.tensor([1.0, 9.0, 1.5])) == {1}
    assert focused_chunks(torch.tensor([1.0, 9.0])) == {0, 1}
    assert focused_chunks(torch.ones(4)) == {0, 1, 2, 3}


def test_focus_is_settled_when_it_was_the_same_for_the_window() -> None:
    """Algorithm 1, line 11, by hand: after layer ``l``, ``l > w`` and the last ``w`` sets are equal."""
    layers = [frozenset(chunks) for chunks in ({0, 1}, {1}, {1}, {1, 2}, {1, 2}, {1, 2}, {1, 2}, {2})]
    settled = {window: [count for count in range(9) if is_settled(layers[:count], window)] for window in (1, 2, 3, 5)}
    assert settled == {1: [2, 3, 4, 5, 6, 7, 8], 2: [3, 5, 6, 7], 3: [6, 7], 5: []}
    # Three layers agree, but the fourth has not been seen.
    assert not is_settled(layers[3:6], 3)


@settings(max_examples=60)
@given(data=st.data())
def test_allocation_is_exact_and_proportional(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda s: sum(s) > 0))
    weights = data.draw(st.lists(st.integers(0, 50), min_size=len(sizes), max_size=len(sizes)))
    budget = data.draw(st.integers(0, sum(sizes)))
    got = allocate(budget, torch.tensor(weights).double(), torch.tensor(sizes))
    assert int(got.sum()) == budget
    assert all(0 <= count <= size for count, size in zip(got.tolist(), sizes, strict=True))
    total = sum(weights)
    if total > 0 and all(budget * w / total + 1 <= s for w, s in zip(weights, sizes, strict=True)):
        assert all(abs(c - budget * w / total) <= 1 for c, w in zip(got.tolist(), weights, strict=True))


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), floor=st.floats(0, 1), share=st.floats(0, 1))
def test_floors_hold_and_the_rest_is_global(lengths: list[int], floor: float, share: float) -> None:
    probe = make_probe(lengths)
    assert probe.scores is not None
    budget = int(share * sum(lengths))
    chosen = top_positions(probe.positions, probe.scores, budget, chunk_index=probe.chunk_index, floor=floor)
    assert chosen.shape[0] == budget
    taken = probe.chunk_index[torch.isin(probe.positions, chosen)]
    for chunk, length in enumerate(lengths):
        # One less is a matter of rounding floats.
        assert int((taken == chunk).sum()) >= int(floor * budget * length / sum(lengths) + 1e-9) - (floor < 1)
    if floor == 0.0:
        assert set(chosen.tolist()) == set(probe.positions[probe.scores.topk(budget).indices].tolist())


@pytest.mark.parametrize("name", ["cacheblend", "kvshare", "prefill_h2o", "cache_craft_online", "fusionrag"])
def test_a_probe_without_what_a_rule_needs_is_an_error(name: str) -> None:
    full = make_probe([4, 4])
    blind = Probe(full.positions, full.chunk_index, full.offset)
    with pytest.raises(FusedKVError, match=f"{name}.* needs"):
        resolve_selector(name).select(blind, 2)


@pytest.mark.parametrize("name", ["cacheblend", "kvshare", "prefill_h2o", "fusionrag", "prophetkv"])
def test_the_choice_moves_with_the_chunks(name: str) -> None:
    probe = make_probe([7, 7])
    swap = [*range(7, 14), *range(7)]
    columns = {field: getattr(probe, field)[swap] for field in ("scores", "deviation", "received", "received_within")}
    moved = resolve_selector(name).select(replace(probe, **columns), 5)
    first = resolve_selector(name).select(probe, 5)
    places, other = torch.searchsorted(probe.positions, first), torch.searchsorted(probe.positions, moved)
    assert sorted(((places + 7) % 14).tolist()) == sorted(other.tolist())
