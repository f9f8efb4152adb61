"""Every selector: budget, order, membership, determinism; and each rule against its formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import make_probe

from fused_kv_llm.errors import ConfigError, FusedKVError
from fused_kv_llm.selectors import (
    SELECTORS,
    Anchors,
    FirstLayersView,
    Probe,
    QueryAttention,
    SinkAttention,
    View,
    budget_tokens,
    resolve_selector,
)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: Anchors("best"), "ranks no anchors"),
        (lambda: Anchors("sink", 0.0), "outside"),
        (lambda: Anchors("sink", 1.5), "outside"),
        (lambda: Anchors("sink", 0.5, "int2"), "use 'auto', 'int8' or 'int4'"),
        (lambda: QueryAttention("x", layers="upper"), "use one of last, all"),
        (lambda: QueryAttention("x", layers=()), "use one of last, all"),
        (lambda: QueryAttention("x", layers="all", floor=1.5), "outside"),
        (lambda: QueryAttention("x", layers="all", full_context=True, anchors=Anchors()), "exclude each other"),
        (lambda: QueryAttention("x", layers=(2, 5)).view(5), "has 5 layers"),
        (lambda: QueryAttention("x", layers=(-6,)).view(5), "has 5 layers"),
    ],
)
def test_a_query_attention_that_cannot_be_is_told(build: Callable[[], object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build()


@pytest.mark.parametrize("name", sorted(SELECTORS))
@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), ratio=st.floats(0, 1))
def test_budget_order_membership_determinism(name: str, lengths: list[int], ratio: float) -> None:
    probe = make_probe(lengths)
    budget = budget_tokens(ratio, sum(lengths))
    selector = resolve_selector(name)
    chosen = selector.select(probe, budget)
    assert chosen.dtype == torch.int64
    most = {"full_reuse": 0, "boundary": sum(lengths[1:]), "cache_craft_online": sum(lengths[1:])}.get(name, budget)
    assert chosen.shape[0] == min(budget, most)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert set(chosen.tolist()) <= set(probe.positions.tolist())
    assert torch.equal(chosen, selector.select(probe, budget))


def test_boundary_takes_the_first_tokens_of_every_chunk_but_the_first() -> None:
    """The first chunk begins the context as its KV does (EPIC): nothing of it is recomputed."""
    probe = make_probe([4, 2, 4])
    assert resolve_selector("boundary").select(probe, 4).tolist() == [12, 13, 17, 18]
    # Of equal places the earlier chunk goes first.
    assert resolve_selector("boundary").select(probe, 3).tolist() == [12, 13, 17]
    assert resolve_selector("boundary").select(probe, 9).tolist() == [12, 13, 17, 18, 19, 20]
    assert resolve_selector("boundary").select(make_probe([4]), 2).tolist() == []
    # The prompt's first chunk is in the KV that an earlier prompt has left: these come after it.
    behind = replace(probe, has_first_chunk=False)
    assert resolve_selector("boundary").select(behind, 4).tolist() == [5, 6, 12, 17]


def test_query_attention_is_a_global_top_k() -> None:
    probe = make_probe([10, 10, 10])
    assert probe.scores is not None
    want = sorted(probe.positions[probe.scores.topk(7).indices].tolist())
    assert resolve_selector("fusionrag").select(probe, 7).tolist() == want


def test_query_attention_does_not_depend_on_chunk_order() -> None:
    probe = make_probe([6, 6])
    assert probe.scores is not None
    swapped = Probe(probe.positions, probe.chunk_index, probe.offset, torch.cat((probe.scores[6:], probe.scores[:6])))
    first = resolve_selector("fusionrag").select(probe, 4)
    second = resolve_selector("fusionrag").select(swapped, 4)
    index = torch.searchsorted(probe.positions, first)
    moved = torch.searchsorted(probe.positions, second)
    assert sorted(((index + 6) % 12).tolist()) == sorted(moved.tolist())


def test_equal_scores_choose_the_earlier_token() -> None:
    probe = make_probe([8])
    flat = Probe(probe.positions, probe.chunk_index, probe.offset, torch.ones(8))
    assert resolve_selector("fusionrag").select(flat, 3).tolist() == [5, 6, 7]


def test_views() -> None:
    assert resolve_selector("fusionrag").view(30) == View(layers=(29,), full_context=False)
    assert resolve_selector("prophetkv").view(3) == View(layers=(0, 1, 2), full_context=True)
    assert resolve_selector("middle_layers").view(30) == View(layers=(13, 14, 15, 16))
    assert resolve_selector("middle_layers").view(2) == View(layers=(0, 1))
    assert resolve_selector("all_layers").view(3) == View(layers=(0, 1, 2))
    assert QueryAttention("mine", layers=(-1, 4)).view(10) == View(layers=(4, 9))
    for name in ("full_reuse", "random", "boundary"):
        assert resolve_selector(name).view(30) == View()


@pytest.mark.parametrize(
    ("ratio", "count", "want"), [(0, 10, 0), (0.15, 10, 1), (0.01, 10, 1), (0.5, 0, 0), (1, 10, 10)]
)
def test_budget(ratio: float, count: int, want: int) -> None:
    assert budget_tokens(ratio, count) == want


def test_random_draws_differently_with_another_seed() -> None:
    one, two = make_probe([200], seed=1), make_probe([200], seed=2)
    assert not torch.equal(resolve_selector("random").select(one, 50), resolve_selector("random").select(two, 50))


def test_unknown_names_and_objects_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"selector='best' is unknown: use one of all_layers, boundary, cache_craft, "
    ):
        resolve_selector("best")
    with pytest.raises(ConfigError, match="no name"):
        resolve_selector(object())  # type: ignore[arg-type]


def test_missing_scores_are_an_error_not_a_guess() -> None:
    probe = make_probe([4])
    blind = Probe(probe.positions, probe.chunk_index, probe.offset)
    with pytest.raises(FusedKVError, match="needs question attention scores"):
        resolve_selector("fusionrag").select(blind, 2)


def test_sink_attention_weighs_the_first_tokens_of_a_chunk() -> None:
    probe = make_probe([30, 30, 30])
    assert probe.scores is not None
    chosen = set(resolve_selector("sink_attention").select(probe, 12).tolist())
    scored = []
    for position, offset, score in zip(
        probe.positions.tolist(), probe.offset.tolist(), probe.scores.tolist(), strict=True
    ):
        scored.append((score * (1 + 8 * math.exp(-offset / 10)), position))
    assert chosen == {position for _, position in sorted(scored, reverse=True)[:12]}
    flat = Probe(probe.positions, probe.chunk_index, probe.offset, torch.ones(90))
    assert resolve_selector("sink_attention").select(flat, 6).tolist() == [5, 6, 38, 39, 71, 72]


def test_a_number_counts_as_its_best_token() -> None:
    scores, offset = torch.tensor([0.1, 0.5, 0.2, 0.3, 0.1, 0.4]), torch.full((6,), 500)
    probe = Probe(torch.arange(6), torch.zeros(6, dtype=torch.int64), offset, scores)
    numbered = replace(probe, numbers=torch.tensor([0, 0, -1, 1, 1, -1]))
    torch.testing.assert_close(SinkAttention().score(probe), scores)
    torch.testing.assert_close(SinkAttention().score(numbered), torch.tensor([0.5, 0.5, 0.2, 0.3, 0.3, 0.4]))
    assert SinkAttention().select(numbered, 2).tolist() == [0, 1]
    empty = Probe(*[torch.empty(0, dtype=torch.int64)] * 3, torch.empty(0), numbers=torch.empty(0, dtype=torch.int64))
    assert SinkAttention().select(empty, 0).tolist() == []
    none = replace(probe, numbers=torch.full((6,), -1))
    torch.testing.assert_close(SinkAttention().score(none), scores)


@pytest.mark.parametrize(
    ("depth", "late", "early"),
    [
        (30, range(16, 24), range(7, 18)),
        (18, range(9, 14), range(4, 10)),
        (3, (1,), (0,)),
        (2, (1,), (0,)),
        (1, (0,), (0,)),
    ],
)
def test_the_default_scores_in_two_groups_of_layers(depth: int, late: Sequence[int], early: Sequence[int]) -> None:
    view = SinkAttention().view(depth)
    assert view.groups == (tuple(early), tuple(late))
    assert view.layers == tuple(sorted({*early, *late}))
    assert view.plain_layers == tuple(early)
    anchors = Anchors("sink", 0.5, "int8")
    assert SinkAttention(anchors=anchors).view(depth) == replace(view, full_context=False, anchors=anchors)


@pytest.mark.parametrize(
    "options",
    [{"layers": (1, 2, 3), "groups": ((1,), (2,))}, {"layers": (1, 2), "groups": ((4,), (5,))},
     {"layers": (1, 2), "groups": ((1,), (2,)), "critical": True}],
)  # fmt: skip
def test_groups_that_do_not_cover_the_layers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="do not cover"):
        View(**options)


def test_scores_of_groups_are_averaged_by_hand() -> None:
    by_layer = torch.tensor([[0.1, 0.4, 0.0], [0.3, 0.2, 0.2], [0.05, 0.9, 0.7]])
    grouped = View((4, 6, 9), groups=((4, 6), (6, 9)))
    wanted = [(0.2 * 0.175) ** 0.5, (0.3 * 0.55) ** 0.5, (0.1 * 0.45) ** 0.5]
    torch.testing.assert_close(grouped.averaged(by_layer), torch.tensor(wanted))
    torch.testing.assert_close(View((4, 6, 9)).averaged(by_layer), by_layer.mean(0))
    apart = View((4, 6, 9), groups=((4,), (6, 9)))
    assert apart.averaged(by_layer)[2] == 0, "no attention in one group is none at all"


def test_the_default_with_anchors_is_what_the_docs_say() -> None:
    early, late, anchors = tuple(range(7, 18)), tuple(range(16, 24)), Anchors("sink", 1.0, "int4", shifted=True)
    view = View(tuple(range(7, 24)), False, anchors, groups=(early, late), plain_layers=early)
    assert SELECTORS["sink_attention_anchors"].view(30) == view


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        (View((2, 3), True), (0, 1, 2, 3)),
        (View((2, 3), False), (2, 3)),
        (View((), True), ()),
        (View((2, 3), False, Anchors()), ()),
        (FirstLayersView(deviation=(1,)), (0, 1)),
    ],
    ids=["the question sees the chunks", "the question alone", "no probe", "anchors", "first layers"],
)
def test_what_is_read_before_anything_is_selected(view: View | FirstLayersView, wanted: tuple[int, ...]) -> None:
    assert view.read_first == wanted


def test_coverage_stops_once_the_attention_is_covered() -> None:
    scores = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.03, 0.02])
    probe = Probe(torch.arange(5, 11), torch.zeros(6, dtype=torch.int64), torch.arange(6), scores)
    for coverage, want in ((0.5, 1), (0.75, 2), (0.9, 3), (1.0, 6)):
        assert SinkAttention(weight=0.0, coverage=coverage).select(probe, 6).tolist() == list(range(5, 5 + want))
    assert SinkAttention(weight=0.0, coverage=0.9).select(probe, 2).tolist() == [5, 6], "the ratio stays the cap"
    with pytest.raises(ConfigError, match=r"coverage=0 is outside"):
        SinkAttention(coverage=0)
