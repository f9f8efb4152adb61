"""Groups of similar chunks."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.grouping import (
    GROUP_CHUNKS,
    JOINING_CHUNKS,
    group_tokens,
    similar_groups,
)


def chunk(number: int, tokens: int, neighbours: tuple[int, ...] = ()) -> PendingChunk:
    near = tuple(f"{other:03}" for other in neighbours)
    return PendingChunk(f"{number:03}", "", tuple([number] * tokens), (near,) if near else ())


def numbers(groups: list[list[PendingChunk]]) -> list[list[int]]:
    return sorted(sorted(int(one.key) for one in group) for group in groups)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), most_tokens=st.integers(1, 900),
    separator=st.integers(0, 3), step=st.integers(1, 40),
)  # fmt: skip
def test_every_chunk_is_in_one_group_within_the_limits(
    lengths: list[int], most_tokens: int, separator: int, step: int
) -> None:
    chunks = [chunk(number, tokens, ((number * step) % 41,)) for number, tokens in enumerate(lengths)]
    groups = similar_groups(chunks, most_tokens, separator)
    assert sorted(one.key for group in groups for one in group) == sorted(one.key for one in chunks)
    for group in groups:
        assert 0 < len(group) <= GROUP_CHUNKS + JOINING_CHUNKS
        assert len(group) == 1 or sum(len(one.token_ids) + separator for one in group) <= most_tokens
    assert similar_groups(chunks[::-1], most_tokens, separator) == groups, "whatever order they come in"


def test_neighbours_are_of_one_group() -> None:
    """Two separate rings, whose chunks alternate."""
    count = 2 * GROUP_CHUNKS
    chunks = [chunk(number, 5, ((number + 2) % count,)) for number in range(count)]
    assert numbers(similar_groups(chunks, 1000, 1)) == [list(range(0, count, 2)), list(range(1, count, 2))]


def topic(first: int, count: int) -> list[PendingChunk]:
    """Chunks that are all neighbours of each other."""
    keys = range(first, first + count)
    return [chunk(number, 5, tuple(other for other in keys if other != number)) for number in keys]


@pytest.mark.parametrize("count", [4, 5, 7])
def test_a_group_that_is_full_of_tokens_ends_where_a_topic_does(count: int) -> None:
    """Three topics are linked by a chunk each, and a group has room for one of them and some chunks more."""
    firsts = (0, 100, 200)
    more = {0: (100,), 100: (200,), 200: (0,)}
    chunks = [
        chunk(number, 5, (*(other for other in range(first, first + count) if other != number), *more.get(number, ())))
        for first in firsts for number in range(first, first + count)
    ]  # fmt: skip
    for room in range(count, 2 * count):
        groups = numbers(similar_groups(chunks, 6 * room, 1))
        assert groups == [list(range(first, first + count)) for first in firsts]


@pytest.mark.parametrize("count", [20, 100])
def test_a_topic_that_no_group_has_room_for_makes_full_ones(count: int) -> None:
    groups = similar_groups(topic(0, count), 6 * 12, 1)
    assert sorted(map(len, groups), reverse=True) == [12] * (count // 12) + [count % 12]


def test_a_chunk_that_is_too_long_for_a_group_does_not_fill_it() -> None:
    """Links to it count for nothing: without it, both topics are one group."""
    first, second = topic(0, 10), topic(100, 8)
    linked = chunk(0, 5, (*range(1, 10), 100))
    named = [chunk(100 + one, 5, (*(100 + other for other in range(8) if other != one), 200)) for one in range(4)]
    groups = similar_groups([linked, *first[1:], *named, *second[4:], chunk(200, 900)], 600, 1)
    assert sorted(map(len, groups)) == [1, 18]


def test_who_is_left_over_joins_the_group_with_the_most_links() -> None:
    first, second = topic(0, GROUP_CHUNKS), topic(100, GROUP_CHUNKS)
    late = [chunk(200 + one, 5, (one, 100, 100 + one)) for one in range(1, JOINING_CHUNKS + 1)]
    want = [list(range(GROUP_CHUNKS)), [*range(100, 100 + GROUP_CHUNKS), *range(201, 201 + JOINING_CHUNKS)]]
    assert numbers(similar_groups([*late, *first, *second], 1000, 1)) == want
    one_more = chunk(300, 5, (1, 100, 101))
    want[0].append(300)
    assert numbers(similar_groups([*late, *first, *second, one_more], 1000, 1)) == want, "where there is room"


def test_groups_grow_along_the_most_links() -> None:
    """Chunk 900 has two links to the group, all others have one; keys and the order of the chunks do not count."""
    star = [chunk(0, 5, tuple(range(1, 5)))]
    ring = [chunk(number, 5, (number % 4 + 1,)) for number in range(1, 5)]
    others = [chunk(500 + number, 5, (1,)) for number in range(20)]
    twice = chunk(900, 5, (1, 2))
    groups = similar_groups([*others, twice, *ring, *star], 1000, 0)
    (found,) = (group for group in groups if any(one.key == "001" for one in group))
    assert {int(one.key) for one in found} >= {0, 1, 2, 3, 4, 900}


def test_being_a_neighbour_is_a_link_too() -> None:
    """The first one's own neighbour is stored already, and it is the only neighbour of the others."""
    chunks = [chunk(0, 5, (99,)), *(chunk(number, 5, (0,)) for number in range(1, 4))]
    assert numbers(similar_groups(chunks, 1000, 1)) == [[0, 1, 2, 3]]


def test_groups_grow_from_chunks_that_many_have_as_a_neighbour() -> None:
    """A path of thirty, each the neighbour of the one before, whose chunk 20 is that of five others too."""
    chunks = [chunk(number, 5, (number + 1,)) for number in range(30)]
    chunks += [chunk(number, 5, (20,)) for number in range(100, 105)]
    (found,) = (group for group in similar_groups(chunks, 1000, 0) if chunks[20] in group)
    assert chunks[19] in found, "and not in a group that grew from the beginning of the path"


def test_time_grows_with_the_chunks_that_have_one_neighbour_in_common() -> None:
    """With few chunks in a group, so that its tokens end it; eight times as many chunks, so squares show as 64."""

    def best_s(count: int) -> float:
        chunks = [chunk(0, 1000, (1,)), *(chunk(number, 1000, (0,)) for number in range(1, count))]
        times_s = []
        for _ in range(3):
            started_s = time.thread_time()
            groups = similar_groups(chunks, 4096, 1)
            times_s.append(time.thread_time() - started_s)
            assert max(len(group) for group in groups) == 4
        return min(times_s)

    assert best_s(8000) < 24 * best_s(1000)


def test_a_chunk_that_is_too_long_for_a_group_does_not_end_it() -> None:
    chunks = [replace(one, token_ids=(1,) * 500) if one.key == "001" else one for one in topic(0, 6)]
    assert numbers(similar_groups(chunks, 100, 1)) == [[0, 2, 3, 4, 5], [1]]


def test_a_chunk_whose_neighbours_are_preprocessed_already_is_not_mixed_with_others() -> None:
    new = [chunk(number, 5, (100 + number,)) for number in range(5)]
    assert similar_groups(new, 1000, 1) == [[one] for one in new]
    ring = [chunk(number, 5, ((number + 1) % 5,)) for number in range(5)]
    assert numbers(similar_groups(ring, 1000, 1)) == [list(range(5))]


def test_large_kv_makes_small_groups() -> None:
    assert group_tokens(9000, 23_040) == 8192
    assert group_tokens(2000, 23_040) == 2000
    assert group_tokens(8000, 2**19) == 1024
