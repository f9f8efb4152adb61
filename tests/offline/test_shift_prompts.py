"""Groups of similar chunks, and the prompts that they are put into."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.shift_prompts import (
    GROUP_CHUNKS,
    LEAST_TOGETHER,
    group_tokens,
    prompts_of_group,
    similar_groups,
)


def chunk(number: int, tokens: int, neighbours: tuple[int, ...] = ()) -> PendingChunk:
    near = tuple(f"{other:03}" for other in neighbours)
    return PendingChunk(f"{number:03}", "", tuple([number] * tokens), (near,) if near else ())


def ids_of(*chunks: PendingChunk) -> dict[str, tuple[int, ...]]:
    return {one.key: one.token_ids for one in chunks}


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), most_tokens=st.integers(1, 900),
    separator=st.integers(0, 3),
)  # fmt: skip
def test_every_chunk_is_in_one_group_within_the_limits(lengths: list[int], most_tokens: int, separator: int) -> None:
    chunks = [chunk(number, tokens, ((number * 7) % 41,)) for number, tokens in enumerate(lengths)]
    groups = list(similar_groups(chunks, most_tokens, separator))
    assert sorted(one.key for group in groups for one in group) == sorted(one.key for one in chunks)
    for group in groups:
        assert 0 < len(group) <= GROUP_CHUNKS
        assert len(group) == 1 or sum(len(one.token_ids) + separator for one in group) <= most_tokens
    again = similar_groups(chunks[::-1], most_tokens, separator)
    assert list(again) == groups, "whatever order they come in"


def test_neighbours_are_of_one_group() -> None:
    """Two separate rings, whose chunks alternate."""
    chunks = [chunk(number, 5, ((number + 2) % 40,)) for number in range(40)]
    groups = list(similar_groups(chunks, 1000, 1))
    assert [{int(one.key) % 2 for one in group} for group in groups] == [{0}, {1}]


def test_a_chunk_whose_neighbours_are_preprocessed_already_is_not_mixed_with_others() -> None:
    new = [chunk(number, 5, (100 + number,)) for number in range(5)]
    assert list(similar_groups(new, 1000, 1)) == [[one] for one in new]
    ring = [chunk(number, 5, ((number + 1) % 5,)) for number in range(5)]
    assert list(similar_groups(ring, 1000, 1)) == [ring]


def test_a_chunk_that_nothing_fits_before_shows_nothing() -> None:
    alone, long = chunk(0, 50, (1,)), chunk(1, 60)
    assert prompts_of_group([alone], ids_of(alone, long), (90,), (), (92,), 100, 100) == []


def test_what_stands_before_a_chunk_stands_behind_it_the_other_time() -> None:
    group = [chunk(number, 3 + number) for number in range(5)]
    forwards, backwards = prompts_of_group(group, ids_of(*group), (90,), (91,), (92,), 1000, 1000)
    for prompt in (forwards, backwards):
        assert prompt.ids[:2] == (90, 91)
        for segment in prompt.segments:
            assert prompt.ids[segment.start : segment.stop] == group[int(str(segment.key))].token_ids
            assert prompt.ids[segment.stop] == 92
    assert [one.key for one in forwards.segments] == [one.key for one in reversed(backwards.segments)]


def test_an_instruction_without_room_is_left_out() -> None:
    group = [chunk(number, 10) for number in range(2)]
    for room, begin in ((23, (90, 91)), (22, (90,))):
        for prompt in prompts_of_group(group, ids_of(*group), (90,), (91,), (92,), room, 1000):
            assert prompt.ids[: prompt.segments[0].start] == begin


def test_a_small_group_stands_behind_neighbours_that_fit() -> None:
    stored = [chunk(number, 10 * number) for number in range(1, 6)]
    alone = chunk(0, 10, (1, 5, 2, 3, 4))
    ids = ids_of(alone, *stored)
    (prompt,) = prompts_of_group([alone], ids, (90,), (), (92,), 1000, 1000)
    assert [one.key for one in prompt.segments] == ["001", "005", "002", "000"]
    assert len(prompt.segments) == LEAST_TOGETHER
    (prompt,) = prompts_of_group([alone], ids, (90,), (), (92,), 60, 1000)
    assert [one.key for one in prompt.segments] == ["001", "002", "000"], "the fifth is too long, and so is the third"


def test_a_long_chunk_does_not_stand_behind_long_ones() -> None:
    """Full prefill takes too long then, however much the model could see."""
    others = [chunk(number, tokens) for number, tokens in ((1, 9_000), (2, 3_000), (3, 3_000))]
    alone = chunk(0, 9_000, (1, 2, 3))
    (prompt,) = prompts_of_group([alone], ids_of(alone, *others), (90,), (), (92,), 100_000, 4_096)
    assert [one.key for one in prompt.segments] == ["002", "000"]


def test_a_chunk_whose_neighbours_are_all_too_long_stands_behind_one() -> None:
    """It would never be preprocessed otherwise."""
    others = [chunk(number, 5_000) for number in (1, 2)]
    alone = chunk(0, 5_000, (1, 2))
    (prompt,) = prompts_of_group([alone], ids_of(alone, *others), (90,), (), (92,), 32_000, 4_096)
    assert [one.key for one in prompt.segments] == ["001", "000"]


def test_large_kv_makes_small_groups() -> None:
    assert group_tokens(8000, 23_040) == 4096
    assert group_tokens(2000, 23_040) == 2000
    assert group_tokens(8000, 2**19) == 2048
