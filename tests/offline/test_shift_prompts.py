"""The prompts that groups of similar chunks are put into."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.grouping import GROUP_CHUNKS, LEAST_TOGETHER
from fused_kv_llm.offline.shift_prompts import prompt_of_group
from fused_kv_llm.offline.variant_builder import PromptChunks


def chunk(number: int, tokens: int, neighbours: tuple[int, ...] = ()) -> PendingChunk:
    near = tuple(f"{other:03}" for other in neighbours)
    return PendingChunk(f"{number:03}", "", tuple([number] * tokens), (near,) if near else ())


def ids_of(*chunks: PendingChunk) -> dict[str, tuple[int, ...]]:
    return {one.key: one.token_ids for one in chunks}


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


def test_a_chunk_beyond_the_limit_stands_behind_one_that_is_too() -> None:
    """It would never be preprocessed otherwise."""
    others = [chunk(number, 5_000) for number in (1, 2)]
    alone = chunk(0, 5_000, (1, 2))
    made = prompt([alone], ids_of(alone, *others), 32_000, 4_096)
    assert made is not None
    assert [one.key for one in made.segments] == ["001", "000"]
