"""Groups of similar chunks, and the prompts that they are put into."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.shift_prompts import (
    GROUP_CHUNKS,
    LEAST_TOGETHER,
    group_tokens,
    prompt_of_group,
    similar_groups,
)
from fused_kv_llm.offline.variant_builder import PromptChunks


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
    count = 2 * GROUP_CHUNKS
    chunks = [chunk(number, 5, ((number + 2) % count,)) for number in range(count)]
    groups = list(similar_groups(chunks, 1000, 1))
    assert [{int(one.key) % 2 for one in group} for group in groups] == [{0}, {1}]


def test_a_chunk_whose_neighbours_are_preprocessed_already_is_not_mixed_with_others() -> None:
    new = [chunk(number, 5, (100 + number,)) for number in range(5)]
    assert list(similar_groups(new, 1000, 1)) == [[one] for one in new]
    ring = [chunk(number, 5, ((number + 1) % 5,)) for number in range(5)]
    assert list(similar_groups(ring, 1000, 1)) == [ring]


INSTRUCTION = (80, 81, 82)


def prompt(
    group: list[PendingChunk], ids: dict[str, tuple[int, ...]], max_tokens: int = 1000, lead_tokens: int = 1000
) -> PromptChunks | None:
    return prompt_of_group(group, ids, (90, 91), INSTRUCTION, (92,), max_tokens, lead_tokens)


def test_a_chunk_that_nothing_fits_before_shows_nothing() -> None:
    alone, long = chunk(0, 50, (1,)), chunk(1, 60)
    assert prompt([alone], ids_of(alone, long), 100, 100) is None


@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=GROUP_CHUNKS), spare=st.integers(0, 6))
def test_a_group_stands_behind_an_instruction_if_there_is_room(lengths: list[int], spare: int) -> None:
    group = [chunk(number, tokens) for number, tokens in enumerate(lengths)]
    made = prompt(group, ids_of(*group), sum(lengths) + len(lengths) + spare)
    assert made is not None
    begin = (90, 91, *(INSTRUCTION if spare >= len(INSTRUCTION) else ()))
    assert made.ids == (*begin, *(token for one in group for token in (*one.token_ids, 92)))
    for one, segment in zip(group, made.segments, strict=True):
        assert (one.key, made.ids[segment.start : segment.stop]) == (segment.key, one.token_ids)


def test_a_small_group_stands_behind_neighbours_that_fit() -> None:
    stored = [chunk(number, 10 * number) for number in range(1, 6)]
    alone = chunk(0, 10, (1, 5, 2, 3, 4))
    ids = ids_of(alone, *stored)
    made = prompt([alone], ids)
    assert made is not None
    assert [one.key for one in made.segments] == ["001", "005", "002", "000"]
    assert len(made.segments) == LEAST_TOGETHER
    made = prompt([alone], ids, 60)
    assert made is not None
    assert [one.key for one in made.segments] == ["001", "002", "000"], "the fifth is too long, and so is the third"


def test_a_long_chunk_does_not_stand_behind_long_ones() -> None:
    """Full prefill takes too long then, however much the model could see."""
    others = [chunk(number, tokens) for number, tokens in ((1, 9_000), (2, 3_000), (3, 3_000))]
    alone = chunk(0, 9_000, (1, 2, 3))
    made = prompt([alone], ids_of(alone, *others), 100_000, 4_096)
    assert made is not None
    assert [one.key for one in made.segments] == ["002", "000"]


def test_large_kv_makes_small_groups() -> None:
    assert group_tokens(8000, 23_040) == 4096
    assert group_tokens(2000, 23_040) == 2000
    assert group_tokens(8000, 2**19) == 2048
