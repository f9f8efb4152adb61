from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.prompt import Alignment, align


def longest_common_run(a: list[int], b: list[int]) -> int:
    best = 0
    row = [0] * (len(b) + 1)
    for x in a:
        row = [0] + [row[j] + 1 if x == y else 0 for j, y in enumerate(b)]
        best = max(best, *row)
    return best


def is_common(found: Alignment, a: list[int], b: list[int]) -> bool:
    in_a = a[found.slice_start : found.slice_start + found.length]
    in_b = b[found.chunk_start : found.chunk_start + found.length]
    return in_a == in_b and len(in_a) == found.length


@given(st.data(), st.integers(1, 5))
def test_equals_the_brute_force_search(data: st.DataObject, alphabet: int) -> None:
    ids = st.lists(st.integers(0, alphabet), max_size=40)
    a, b = data.draw(ids), data.draw(ids)
    found = align(a, b)
    assert is_common(found, a, b)
    assert found.length == longest_common_run(a, b)


@given(
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), min_size=5, max_size=60),
    st.lists(st.integers(0, 3), max_size=6),
)
def test_edges_that_differ_cost_only_the_edges(head: list[int], body: list[int], tail: list[int]) -> None:
    a, b = [*head, *body], [*body, *tail]
    found = align(a, b)
    assert is_common(found, a, b)
    assert found.length == longest_common_run(a, b) >= len(body)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1], []), ([], [1]), ([1, 2], [3, 4])])
def test_nothing_in_common(a: list[int], b: list[int]) -> None:
    assert align(a, b) == Alignment(0, 0, 0)


def test_one_changed_token_in_a_long_chunk() -> None:
    rng = random.Random(0)
    chunk = [rng.randrange(50_000) for _ in range(3000)]
    piece = [*chunk[5:2000], 7, *chunk[2001:]]
    assert align(piece, chunk) == Alignment(0, 5, 1995)


def test_repetitive_input_of_unequal_length() -> None:
    assert align([4] * 500, [4] * 2000).length == 500
    assert align([4, 5] * 300, [5, 4] * 300).length == 599
