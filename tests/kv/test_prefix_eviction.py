"""PGDSF in the prefix tree against RAGCache's algorithm 1, written down once more and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.kv import PrefixRun, PrefixTree, RankedEviction

TOKEN_NBYTES = 8
Seconds = Callable[[float, float], float]


def seconds(cached: float, new: float) -> float:
    return 3.0 + new + 0.01 * new * (cached + new / 2)


@dataclass
class Node:
    """A document behind others, as in the paper."""

    documents: tuple[int, ...]
    size: int
    frequency: int = 0
    costs: list[float] = field(default_factory=list)
    priority: float = 0.0
    used: int = 0


class Reference:
    """Algorithm 1 with one level, over documents of known sizes."""

    def __init__(self, budget: int) -> None:
        self.budget, self.clock, self.uses = budget, 0.0, 0
        self.nodes: dict[tuple[int, ...], Node] = {}

    def ask(self, documents: list[int], size_of: Callable[[int], int]) -> int:
        paths = [tuple(documents[: n + 1]) for n in range(len(documents))]
        found = [path for path in paths if path in self.nodes]
        cached = sum(self.nodes[path].size for path in found)
        new = sum(map(size_of, documents)) - cached
        for path in found:
            self.update(self.nodes[path])
        for path in found:
            self.uses += 1
            self.nodes[path].used = self.uses
        for path in paths[len(found) :]:
            node = Node(path, size_of(path[-1]))
            if node.size > self.budget:
                # Nothing makes room for what never fits.
                return cached
            self.evict(node.size, path[:-1])
            if sum(one.size for one in self.nodes.values()) + node.size > self.budget:
                return cached
            self.nodes[path] = node
            self.update(node, seconds(cached, new) / new)
        return cached

    def update(self, node: Node, cost: float | None = None) -> None:
        self.uses += 1
        node.frequency, node.used = node.frequency + 1, self.uses
        if cost is not None:
            node.costs.append(cost)
        cost = sum(node.costs) / len(node.costs) * node.size
        # Equation 2, rounded as the store's formula is: equal priorities have to be equal here too.
        node.priority = self.clock + node.frequency * cost / node.size

    def evict(self, size: int, parent: tuple[int, ...]) -> None:
        while sum(one.size for one in self.nodes.values()) + size > self.budget:
            leaves = [
                one
                for path, one in self.nodes.items()
                if path != parent and not any(other[:-1] == path for other in self.nodes)
            ]
            if not leaves:
                return
            gone = min(leaves, key=lambda one: (one.priority, one.used))
            self.clock = max(self.clock, gone.priority)
            del self.nodes[gone.documents]


def tokens_of(documents: list[int], size_of: Callable[[int], int]) -> list[int]:
    return [100 * document + place for document in documents for place in range(size_of(document))]


def insert_by_document(tree: PrefixTree, documents: list[int], size_of: Callable[[int], int], cached: int) -> None:
    """Leave a prompt whose documents are nodes: each is a run that is matched whole."""
    runs, at = list[PrefixRun](), 0
    for document in documents:
        at += size_of(document)
        runs.append(PrefixRun(at, "fused", whole=True))
    tree.insert(tokens_of(documents, size_of), runs, torch.zeros(1, 1, at, 1), torch.zeros(1, 1, at, 1), cached=cached)


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=5, max_size=40),
    st.integers(3, 25),
)
def test_the_tree_is_algorithm_1(requests: list[list[int]], budget: int) -> None:
    def size_of(document: int) -> int:
        return 1 + document

    rule = RankedEviction("pgdsf", seconds)
    tree, reference = PrefixTree(budget * TOKEN_NBYTES, rule), Reference(budget)
    for documents in requests:
        match = tree.match(tokens_of(documents, size_of), "fused")
        found = match.num_tokens
        match.release()
        insert_by_document(tree, documents, size_of, found)
        assert found == reference.ask(documents, size_of)
        assert rule.clocks == pytest.approx((reference.clock, 0.0))
        priorities = sorted(rule.rank(node, 0)[0] for node in tree._root.below())
        assert priorities == pytest.approx(sorted(node.priority for node in reference.nodes.values()))


def one_node(tree: PrefixTree, ids: list[int], cached: int | None = None) -> None:
    count = len(ids)
    tree.insert(ids, [PrefixRun(count)], torch.zeros(1, 1, count, 1), torch.zeros(1, 1, count, 1), cached=cached)


def test_the_cost_is_averaged_over_the_requests_that_computed_it() -> None:
    """Two requests at once compute the same prompt: one without anything cached, one behind two tokens."""
    rule = RankedEviction("pgdsf", seconds)
    tree = PrefixTree(10**6, rule)
    one_node(tree, [1, 2])
    one_node(tree, [1, 2, 3, 4, 5, 6], cached=0)
    one_node(tree, [1, 2, 3, 4, 5, 6], cached=2)
    node = next(node for node in tree._root.below() if node.num_tokens == 4)
    average = (seconds(0, 6) / 6 + seconds(2, 4) / 4) / 2
    assert rule.rank(node, 0)[0] == pytest.approx(2 * average)


def test_a_request_that_found_a_node_and_leaves_it_again_counts_once() -> None:
    rule = RankedEviction("lfu")
    tree = PrefixTree(10**6, rule)
    one_node(tree, [1, 2, 3])
    for _ in range(3):
        tree.match([1, 2, 3], None).release()
        one_node(tree, [1, 2, 3], cached=3)
    assert rule.rank(next(tree._root.below()), 0)[0] == 4


def test_uses_count_anew_after_a_window_without_one() -> None:
    rule = RankedEviction("lfu", window=5)
    tree = PrefixTree(10**6, rule)
    one_node(tree, [1])
    for _ in range(3):
        tree.match([1], None).release()
    node = next(tree._root.below())
    assert rule.rank(node, 0)[0] == 4
    one_node(tree, [2])
    for _ in range(6):
        tree.match([2], None).release()
    tree.match([1], None).release()
    assert rule.rank(node, 0)[0] == 1


def test_a_cut_node_stays_what_it_was() -> None:
    rule = RankedEviction("pgdsf", seconds)
    tree = PrefixTree(10**6, rule)
    one_node(tree, [1, 2, 3, 4])
    before = rule.rank(next(tree._root.below()), 0)[0]
    one_node(tree, [1, 2, 9], cached=2)
    tail = next(node for node in tree._root.below() if node.ids.tolist() == [3, 4])
    assert rule.rank(tail, 0)[0] == pytest.approx(before)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="arc"):
        RankedEviction("arc")
