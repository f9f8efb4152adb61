"""The prefix tree against a list that is searched from end to end; what makes room, and what never does."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.errors import FusedKVError
from fused_kv_llm.kv import PrefixRun, PrefixTree
from fused_kv_llm.kv.prefix_node import PrefixNode

LAYERS, HEADS, DIM = 2, 1, 3
TOKEN_NBYTES = 2 * LAYERS * HEADS * DIM * 4
PLENTY = 10**9


class Kept(NamedTuple):
    """Token ids and how they came by their KV."""

    ids: list[int]
    runs: list[PrefixRun]

    def kinds(self) -> list[tuple[str | None, int]]:
        """Return, for every token, its recipe and the stop of the run that it holds with, 0 for no such run."""
        found, at = list[tuple[str | None, int]](), 0
        for run in self.runs:
            found += [(str(run.recipe) if run.recipe else None, run.stop if run.whole else 0)] * (run.stop - at)
            at = run.stop
        return found

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return KV that tells tokens, positions, everything before them and recipes apart."""
        numbers, before = [], 0
        for place, (token, kind) in enumerate(zip(self.ids, self.kinds(), strict=True)):
            before = hash((before, token, kind, place)) % 100003
            numbers.append(float(before))
        keys = torch.tensor(numbers)[None, None, :, None].expand(LAYERS, HEADS, -1, DIM)
        return keys, -keys

    def matched(self, ids: Sequence[int], recipe: str | None) -> int:
        """Return how many of the first tokens of `ids` this sequence has KV for."""
        same = 0
        while same < min(len(ids), len(self.ids)) and ids[same] == self.ids[same]:
            same += 1
        at = 0
        for run in self.runs:
            if run.recipe not in (None, recipe) or (run.whole and same < run.stop):
                return at
            at = min(run.stop, same)
            if same < run.stop:
                return at
        return at


@st.composite
def sequences(draw: st.DrawFn) -> Kept:
    ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=14))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=3)))
    runs, recipe = list[PrefixRun](), None
    for stop in [*cuts, len(ids)]:
        runs.append(PrefixRun(stop, recipe, whole=recipe is not None and draw(st.booleans())))
        recipe = recipe or draw(st.sampled_from([None, "a", "b"]))
    return Kept(ids, runs)


def insert(tree: PrefixTree, one: Kept, since: int | None = None) -> int:
    return tree.insert(one.ids, one.runs, *one.kv(), since=since)


def nodes(tree: PrefixTree) -> list[PrefixNode]:
    found, rest = list[PrefixNode](), list(tree._root.children())
    while rest:
        found.append(rest.pop())
        rest += found[-1].children()
    return found


def check_books(tree: PrefixTree) -> None:
    """Check that bytes and leaves are those of the nodes, and that every node has memory of its own."""
    every = nodes(tree)
    assert tree.nbytes == sum(node.nbytes for node in every) <= tree.max_bytes
    assert tree.nbytes == TOKEN_NBYTES * sum(node.num_tokens for node in every)
    assert tree._levels.leaves == {node for node in every if node.is_leaf}
    tensors = [tensor for node in every for tensor in node.kv or ()]
    assert all(tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


@settings(max_examples=400)
@given(st.lists(sequences(), max_size=8), sequences(), st.sampled_from([None, "a", "b"]))
def test_the_longest_match_is_that_of_a_search_through_everything(
    kept: list[Kept], wanted: Kept, recipe: str | None
) -> None:
    tree = PrefixTree(PLENTY)
    for one in kept:
        assert insert(tree, one) == len(one.ids)
        check_books(tree)
    for ids in (wanted.ids, *(one.ids for one in kept)):
        match = tree.match(ids, recipe)
        assert match.num_tokens == max((one.matched(ids, recipe) for one in kept), default=0)
        # What was found is what some request left, all of it of one request and its ancestors.
        keys, values = torch.zeros(2, LAYERS, HEADS, len(ids), DIM)
        match.write(keys, values, len(ids))
        count = match.num_tokens
        want = [one.kv()[0][:, :, :count] for one in kept if one.matched(ids, recipe) == count]
        assert not count or any(torch.equal(keys[:, :, :count], one) for one in want)
        assert torch.equal(values, -keys)
        assert not keys[:, :, count:].any()
        runs = [PrefixRun(0), *match.runs]
        assert all(run.recipe in (None, recipe) for run in runs)
        match.release()


@settings(max_examples=200)
@given(st.lists(sequences(), min_size=1, max_size=10), st.integers(0, 25), st.randoms(use_true_random=False))
def test_bytes_are_bounded_and_pinned_nodes_and_their_ancestors_stay(
    kept: list[Kept], room: int, drawn: random.Random
) -> None:
    tree, held = PrefixTree(room * TOKEN_NBYTES), []
    for one in kept:
        assert insert(tree, one) <= room
        check_books(tree)
        if drawn.random() < 0.5:
            held.append((one, tree.match(one.ids, drawn.choice([None, "a", "b"]))))
        for other, match in held:
            again = tree.match(other.ids, match.runs[-1].recipe if match.runs else None)
            assert again.num_tokens >= match.num_tokens
            again.release()
    for _, match in held:
        match.release()
        match.release()
    assert all(node.pins == 0 for node in nodes(tree))


def test_leaves_make_room_first_and_of_them_those_used_longest_ago() -> None:
    tree = PrefixTree(8 * TOKEN_NBYTES)
    for ids in ([1, 2, 3, 4], [1, 2, 5, 6]):
        insert(tree, Kept(ids, [PrefixRun(4)]))
    assert tree.nbytes == 6 * TOKEN_NBYTES
    tree.match([1, 2, 3, 4], None).release()
    insert(tree, Kept([7, 8, 9], [PrefixRun(3)]))
    assert tree.match([1, 2, 5, 6], None).num_tokens == 2
    assert tree.match([1, 2, 3, 4], None).num_tokens == 4


def test_a_run_that_is_matched_whole_is_kept_whole_or_not_at_all() -> None:
    tree = PrefixTree(6 * TOKEN_NBYTES)
    whole = Kept(list(range(9)), [PrefixRun(2), PrefixRun(7, "a", whole=True), PrefixRun(9, "a")])
    assert insert(tree, whole) == 2
    assert tree.match(whole.ids, "a").num_tokens == 2
    exact = Kept(list(range(9)), [PrefixRun(9)])
    assert insert(tree, exact) == 6


def test_fused_kv_never_answers_an_exact_look_up_nor_one_of_another_recipe() -> None:
    tree = PrefixTree(PLENTY)
    fused = Kept([1, 2, 3, 4, 5, 6], [PrefixRun(2), PrefixRun(4, "a", whole=True), PrefixRun(6, "a")])
    insert(tree, fused)
    assert [tree.match(fused.ids, recipe).num_tokens for recipe in (None, "a", "b")] == [2, 6, 2]
    # Without the question that its tokens were chosen by, it is of no use.
    assert tree.match([1, 2, 3, 9], "a").num_tokens == 2
    assert tree.match([1, 2, 3, 4, 9], "a").num_tokens == 4
    insert(tree, Kept(fused.ids, [PrefixRun(6)]))
    assert [tree.match(fused.ids, recipe).num_tokens for recipe in (None, "a", "b")] == [6, 6, 6]
    assert tree.match(fused.ids, "a").runs == [PrefixRun(2), PrefixRun(6)]


def test_one_question_does_not_get_the_chunks_that_were_chosen_for_a_shorter_one() -> None:
    tree = PrefixTree(PLENTY)
    short = Kept([1, 2, 3, 4], [PrefixRun(4, "a", whole=True)])
    long = Kept([1, 2, 3, 4, 5], [PrefixRun(5, "a", whole=True)])
    insert(tree, long)
    assert tree.match(short.ids, "a").num_tokens == 0
    insert(tree, short)
    assert tree.match(short.ids, "a").num_tokens == 4
    assert tree.match(long.ids, "a").num_tokens == 5


def test_nothing_is_kept_without_room_or_of_what_was_forgotten_meanwhile() -> None:
    one = Kept([1, 2, 3], [PrefixRun(3)])
    assert insert(PrefixTree(0), one) == 0
    tree = PrefixTree(PLENTY)
    match = tree.match(one.ids, None)
    tree.clear()
    assert insert(tree, one, since=match.version) == 0
    assert insert(tree, one, since=tree.match(one.ids, None).version) == 3
    held = tree.match(one.ids, None)
    tree.clear()
    assert (tree.nbytes, tree.num_nodes, tree.match(one.ids, None).num_tokens) == (0, 0, 0)
    held.release()
    insert(tree, one)
    check_books(tree)


def test_a_split_keeps_who_has_pinned_the_node_safe() -> None:
    tree = PrefixTree(8 * TOKEN_NBYTES)
    first = Kept([1, 2, 3, 4, 5, 6], [PrefixRun(6)])
    insert(tree, first)
    match = tree.match(first.ids, None)
    insert(tree, Kept([1, 2, 7, 8], [PrefixRun(4)]))
    assert insert(tree, Kept([9] * 6, [PrefixRun(6)])) == 2
    assert tree.match(first.ids, None).num_tokens == 6
    keys, values = torch.zeros(2, LAYERS, HEADS, 6, DIM)
    match.write(keys, values, 6)
    assert torch.equal(keys, first.kv()[0])


@pytest.mark.parametrize(
    "runs",
    [[PrefixRun(2, "a"), PrefixRun(3)], [PrefixRun(4)], [PrefixRun(2), PrefixRun(1)]],
)
def test_runs_out_of_order_are_refused(runs: list[PrefixRun]) -> None:
    with pytest.raises(FusedKVError, match="not in order"):
        PrefixTree(PLENTY).insert([1, 2, 3], runs, *Kept([1, 2, 3], [PrefixRun(3)]).kv())


def test_threads_may_use_it_at_once() -> None:
    tree, errors = PrefixTree(60 * TOKEN_NBYTES), list[BaseException]()

    def work(seed: int) -> None:
        drawn = np.random.default_rng(seed)
        try:
            for _ in range(150):
                ids = drawn.integers(0, 3, drawn.integers(1, 20)).tolist()
                one = Kept(ids, [PrefixRun(len(ids))])
                match = tree.match(ids, None)
                keys, values = torch.zeros(2, LAYERS, HEADS, len(ids), DIM)
                insert(tree, one)
                match.write(keys, values, len(ids))
                assert torch.equal(keys[:, :, : match.num_tokens], one.kv()[0][:, :, : match.num_tokens])
                match.release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check_books(tree)
    assert all(node.pins == 0 for node in nodes(tree))
