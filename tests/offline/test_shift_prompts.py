"""The prompts that groups of similar chunks are put into."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from math import factorial

from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.grouping import LEAST_TOGETHER
from fused_kv_llm.offline.shift_prompts import (
    CARRIED_CHUNKS,
    MOST_TOGETHER,
    GroupPrompt,
    PromptShape,
    prompts_of_group,
)
from fused_kv_llm.prompt import Segment


def chunk(number: int, tokens: int, neighbours: tuple[int, ...] = ()) -> PendingChunk:
    near = tuple(f"{other:03}" for other in neighbours)
    return PendingChunk(f"{number:03}", "", tuple([number] * tokens), (near,) if near else ())


def shaped(room: int = 1000, lead: int = 1000, times: int = 2, instruction: tuple[int, ...] = (91,)) -> PromptShape:
    return PromptShape((90,), instruction, (92,), room, lead, times)


def numbers(places: tuple[Segment, ...]) -> list[int]:
    return [int(str(one.key)) for one in places]


def shown_in(prompt: GroupPrompt) -> list[int]:
    return numbers(prompt.shown)


def ids_of(*chunks: PendingChunk) -> dict[str, tuple[int, ...]]:
    return {one.key: one.token_ids for one in chunks}


def test_a_chunk_that_nothing_fits_before_shows_nothing() -> None:
    alone, long = chunk(0, 50, (1,)), chunk(1, 60)
    assert prompts_of_group([alone], ids_of(alone, long), shaped(100, 100)) == []


def test_what_stands_before_a_chunk_stands_behind_it_the_other_time() -> None:
    group = [chunk(number, 3 + number) for number in range(5)]
    forwards, backwards = prompts_of_group(group, ids_of(*group), shaped())
    for prompt in (forwards, backwards):
        assert prompt.ids[:2] == (90, 91)
        for segment in prompt.shown:
            assert prompt.ids[segment.start : segment.stop] == group[int(str(segment.key))].token_ids
            assert prompt.ids[segment.stop] == 92
    assert shown_in(forwards) == shown_in(backwards)[::-1]
    assert forwards.carried == backwards.carried == (), "all of the group stand in both"


@given(count=st.integers(1, 40), times=st.sampled_from((1, 2, 4)))
def test_every_chunk_is_in_so_many_prompts(count: int, times: int) -> None:
    group = [chunk(number, 1 + number % 3, (99,)) for number in range(count)]
    prompts = prompts_of_group(group, ids_of(*group, chunk(99, 5)), shaped(times=times))
    places = [shown_in(prompt) for prompt in prompts]
    assert all(len(set(keys)) == len(keys) for keys in places)
    seen = Counter(key for keys in places for key in keys if key != 99)
    if times == 1 and count > MOST_TOGETHER:
        assert [key for keys in places for key in keys] == list(range(count))
        assert max(map(len, places)) <= MOST_TOGETHER
    else:
        assert seen == dict.fromkeys(range(count), min(max(times, 2), factorial(count)))
        assert len({tuple(keys) for keys in places}) == len(places)
        assert max(map(len, places)) <= max(MOST_TOGETHER, (count + 1) // 2)


@given(count=st.integers(MOST_TOGETHER + 1, 40), times=st.sampled_from((1, 2, 4)))
def test_a_prompt_begins_with_the_last_chunks_of_the_one_before_it(count: int, times: int) -> None:
    """But with none of its own, which it would only copy."""
    group = [chunk(number, 1 + number % 3) for number in range(count)]
    prompts = prompts_of_group(group, ids_of(*group), shaped(times=times))
    assert numbers(prompts[0].carried) == [count - 1], "the first one with the plain KV of the group's last chunk"
    for before, prompt in pairwise(prompts):
        others = [key for key in shown_in(before) if key not in shown_in(prompt)]
        assert numbers(prompt.carried) == others[-CARRIED_CHUNKS:]
        assert len(others) >= CARRIED_CHUNKS - 1
        for place in (*prompt.carried, *prompt.shown):
            assert prompt.ids[place.start : place.stop] == group[int(str(place.key))].token_ids
        assert prompt.ids[:2] == (90, 91)
        assert prompt.carried[0].start == 2


@given(count=st.integers(LEAST_TOGETHER, 40))
def test_four_prompts_are_the_two_and_two_more(count: int) -> None:
    group = [chunk(number, 1 + number % 3) for number in range(count)]
    two, four = (prompts_of_group(group, ids_of(*group), shaped(times=times)) for times in (2, 4))
    assert four[: len(two)] == two
    orders = [shown_in(prompt) for prompt in four]
    assert sorted(orders) == sorted(order[::-1] for order in orders)


def test_one_prompt_of_each_chunk_is_a_run_behind_the_chunks_before_it() -> None:
    group = [chunk(number, 2) for number in range(MOST_TOGETHER + 2)]
    first, second = prompts_of_group(group, ids_of(*group), shaped(times=1))
    assert (numbers(first.carried), shown_in(first)) == ([9], [0, 1, 2, 3, 4])
    assert (numbers(second.carried), shown_in(second)) == ([2, 3, 4], [5, 6, 7, 8, 9])


def test_the_chunks_of_a_large_group_stand_behind_others_the_second_time() -> None:
    """And none is among the first five both times; the group's first stands behind a single one, once."""
    group = [chunk(number, 1) for number in range(32)]
    prompts = prompts_of_group(group, ids_of(*group), shaped())
    before: dict[str, list[set[str]]] = defaultdict(list)
    for prompt in prompts:
        keys = [str(one.key) for one in (*prompt.carried, *prompt.shown)]
        for place in prompt.shown:
            before[str(place.key)].append(set(keys[: keys.index(str(place.key))]))
    for key, (first, second) in before.items():
        assert max(len(first), len(second)) >= 5
        # At both ends of the group a prompt begins with chunks that stood before them in the other prompt too.
        ends = int(key) < 2 * CARRIED_CHUNKS or int(key) >= 32 - 2 * CARRIED_CHUNKS
        assert ends or len(first & second) <= min(len(first), len(second)) / 2
    few = [key for key, places in before.items() for place in places if len(place) < 2]
    assert few == ["000"]


def test_an_instruction_without_room_is_left_out() -> None:
    group = [chunk(number, 10) for number in range(2)]
    for room, begin in ((23, (90, 91)), (22, (90,))):
        for prompt in prompts_of_group(group, ids_of(*group), shaped(room)):
            assert prompt.ids[: prompt.shown[0].start] == begin


def test_a_small_group_stands_behind_neighbours_that_fit() -> None:
    stored = [chunk(number, 10 * number) for number in range(1, 6)]
    alone = chunk(0, 10, (1, 5, 2, 3, 4))
    ids = ids_of(alone, *stored)
    (prompt,) = prompts_of_group([alone], ids, shaped())
    assert shown_in(prompt) == [1, 5, 2, 0]
    assert len(prompt.shown) == LEAST_TOGETHER
    (prompt,) = prompts_of_group([alone], ids, shaped(60, instruction=()))
    assert shown_in(prompt) == [1, 2, 0], "the fifth is too long, and so is the third"


def test_a_long_chunk_does_not_stand_behind_long_ones() -> None:
    """Full prefill takes too long then, however much the model could see."""
    others = [chunk(number, tokens) for number, tokens in ((1, 9_000), (2, 3_000), (3, 3_000))]
    alone = chunk(0, 9_000, (1, 2, 3))
    (prompt,) = prompts_of_group([alone], ids_of(alone, *others), shaped(100_000, 4_096))
    assert shown_in(prompt) == [2, 0]


def test_a_chunk_whose_neighbours_are_all_too_long_stands_behind_one() -> None:
    """It would never be preprocessed otherwise."""
    others = [chunk(number, 5_000) for number in (1, 2)]
    alone = chunk(0, 5_000, (1, 2))
    (prompt,) = prompts_of_group([alone], ids_of(alone, *others), shaped(32_000, 4_096))
    assert shown_in(prompt) == [1, 0]
