"""The prefix tree on two levels: what leaves the device, what is copied, and what never happens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fused_kv_llm.kv import HostLevel, PrefixRun, PrefixTree, RankedEviction
from fused_kv_llm.kv.prefix_node import PrefixNode
from fused_kv_llm.store import POLICIES

NODE_NBYTES = 8


class Storage:
    """A level of its own: tensors that are there are clones, and counted."""

    def __init__(self) -> None:
        self.copied_nbytes = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.copied_nbytes += tensor.nbytes
        return tensor.clone()


class Tree(PrefixTree):
    """A tree of tokens of 8 bytes with two levels."""

    def __init__(
        self, device: int, host: int, policy: str = "pgdsf", *, once: bool = True, share: float = 0.25
    ) -> None:
        self.out, self.back = Storage(), Storage()
        level = HostLevel(host * NODE_NBYTES, self.out, self.back, once, share)
        super().__init__(device * NODE_NBYTES, RankedEviction(policy), level)

    def ask(self, ids: list[int]) -> int:
        """Ask as a request does; return the tokens found, checked."""
        match = self.match(ids, None)
        keys, values = torch.zeros(2, 1, 1, len(ids), 1)
        match.write(keys, values, len(ids))
        found, want = match.num_tokens, kv(ids)
        assert torch.equal(keys[:, :, :found], want[0][:, :, :found])
        assert torch.equal(values[:, :, :found], want[1][:, :, :found])
        self.insert(ids, [PrefixRun(len(ids))], *want, cached=found)
        match.release()
        self.check()
        return found

    def nodes(self) -> list[PrefixNode]:
        return list(self._root.below())

    def check(self) -> None:
        every = self.nodes()
        assert self.nbytes == sum(node.nbytes for node in every) <= self.max_bytes
        assert self.host_nbytes == sum(node.host_nbytes for node in every) <= self._levels._host.max_bytes
        assert self.nbytes == NODE_NBYTES * sum(node.num_tokens for node in every if node.kv)
        for node in every:
            assert node.kv is not None or node.host_kv is not None
            # The device has the upper part of the tree.
            if node.kv is not None and node.parent is not self._root:
                assert node.parent.kv is not None
        on_device = [node for node in every if node.kv]
        assert self._levels.leaves == {n for n in on_device if not any(child.kv for child in n.children())}
        assert self._levels._away == {node for node in every if not node.kv}
        assert self.swaps.out_nbytes == self.out.copied_nbytes
        assert self.swaps.in_nbytes == self.back.copied_nbytes


def kv(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, before = [], 0
    for place, token in enumerate(ids):
        before = hash((before, token, place)) % 100003
        numbers.append(float(before))
    keys = torch.tensor(numbers)[None, None, :, None]
    return keys, -keys


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=25)


@pytest.mark.parametrize("policy", list(POLICIES))
@settings(max_examples=60)
@given(prompts=PROMPTS, device=st.integers(0, 20), host=st.integers(0, 20), once=st.booleans(), held=st.integers(0, 9))
def test_levels_are_bounded_parents_are_above_and_what_is_found_is_right(
    policy: str, prompts: list[list[int]], device: int, host: int, once: bool, held: int
) -> None:
    tree, matches = Tree(device, host, policy, once=once), []
    for number, ids in enumerate(prompts):
        tree.ask(ids)
        if number % 10 == held:
            matches.append((ids, tree.match(ids, None)))
        for other, match in matches:
            assert tree.match(other, None).num_tokens >= match.num_tokens
    for _, match in matches:
        match.release()


@given(prompts=PROMPTS, device=st.integers(1, 12))
@settings(max_examples=100)
def test_with_room_on_the_host_nothing_is_ever_copied_there_twice(prompts: list[list[int]], device: int) -> None:
    tree = Tree(device, 10_000)
    for ids in prompts:
        tree.ask(ids)
    tokens = sum(node.num_tokens for node in tree.nodes())
    assert tree.swaps.out_nbytes == tree.host_nbytes <= tokens * NODE_NBYTES


def test_the_second_time_only_device_memory_is_freed() -> None:
    for once in (True, False):
        tree = Tree(1, 10, once=once)
        for _ in range(4):
            for token in (1, 2):
                tree.ask([token])
        assert tree.swaps.in_nbytes == 6 * NODE_NBYTES
        assert tree.swaps.out_nbytes + tree.swaps.spared_nbytes == 7 * NODE_NBYTES
        assert tree.swaps.out_nbytes == (2 if once else 7) * NODE_NBYTES


def test_what_leaves_the_host_as_well_is_forgotten() -> None:
    tree = Tree(1, 1, "lru")
    for token in (1, 2, 3):
        tree.ask([token])
    where = {node.ids.tolist()[0]: (node.kv is not None, node.host_kv is not None) for node in tree.nodes()}
    assert where == {2: (False, True), 3: (True, False)}


@pytest.mark.parametrize("policy", ["pgdsf", "lru"])
@settings(max_examples=80)
# One that was copied, lost and brought back, while others were copied in its place.
@example(prompts=[[0], [2, 0], *[[0]] * 9, [2]], device=3, host=7, share=0.3, every=2)
@given(
    prompts=PROMPTS, device=st.integers(1, 20), host=st.integers(0, 40), share=st.sampled_from([0.0, 0.3, 1.0]),
    every=st.integers(1, 6),
)  # fmt: skip
def test_what_is_left_of_a_lost_device_is_what_the_host_has_copies_of(
    policy: str, prompts: list[list[int]], device: int, host: int, share: float, every: int
) -> None:
    tree = Tree(device, host, policy, share=share)
    for number, ids in enumerate(prompts, 1):
        tree.ask(ids)
        hot = [node for node in tree.nodes() if node.kv and node.host_kv]
        assert all(node.parent is tree._root or node.parent.host_kv for node in hot if node in tree._levels._hot)
        copied = sum(node.host_nbytes for node in hot if node in tree._levels._hot)
        assert copied <= share * host * NODE_NBYTES
        if number % every == 0:
            held = tree.match(ids, None)
            left = {id(node) for node in tree.nodes() if has_copies(tree, node)}
            tree.lose_device()
            tree.check()
            assert tree.nbytes == 0
            assert {id(node) for node in tree.nodes()} == left
            held.release()
            assert all(not node.pins for node in tree.nodes())


def has_copies(tree: Tree, node: PrefixNode | None) -> bool:
    """Whether a node and all that stand before it have a copy on the host."""
    if node is None or node is tree._root:
        return node is not None
    return node.host_kv is not None and has_copies(tree, node.parent)


def test_a_system_prompt_comes_back_from_the_host() -> None:
    for share, found in ((0.5, 3), (0.0, 0)):
        tree = Tree(100, 100, share=share)
        for tail in range(1, 5):
            tree.ask([7, 7, 7, tail])
        assert tree.swaps.out_nbytes == found * NODE_NBYTES
        tree.lose_device()
        assert tree.num_nodes == (1 if found else 0)
        assert tree.ask([7, 7, 7, 9]) == found
        assert tree.swaps.in_nbytes == found * NODE_NBYTES


def test_a_hotter_node_takes_the_place_of_a_cooler_one() -> None:
    tree = Tree(100, 8, share=0.25)
    for ids in ([1, 1], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2], [2, 2], [2, 2]):
        tree.ask(ids)
    assert [node.ids[0] for node in tree.nodes() if node.host_kv] == [2]
    tree.ask([3, 3])
    assert [node.ids[0] for node in tree.nodes() if node.host_kv] == [2]


def test_nothing_is_left_in_the_tree_by_who_began_before_the_loss() -> None:
    tree = Tree(100, 100)
    version = tree.version
    tree.lose_device()
    assert tree.insert([1, 2], [PrefixRun(2)], *kv([1, 2]), since=version) == 0
