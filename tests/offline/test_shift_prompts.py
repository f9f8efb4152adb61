"""The prompts that groups of similar chunks are put into."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import factorial

from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.grouping import LEAST_TOGETHER
from fused_kv_llm.offline.shift_prompts import MOST_TOGETHER, PromptShape, ShiftPrompt, prompts_of_group


def chunk(number: int, tokens: int, neighbours: tuple[int, ...] = ()) -> PendingChunk:
    near = tuple(f"{other:03}" for other in neighbours)
    return PendingChunk(f"{number:03}", "", tuple([number] * tokens), (near,) if near else ())


def shaped(room: int = 1000, lead: int = 1000, times: int = 2, instruction: tuple[int, ...] = (91,)) -> PromptShape:
    return PromptShape((90,), instruction, (92,), room, lead, times)


def places_in(one: ShiftPrompt) -> list[int]:
    return [int(str(place.key)) for place in one.prompt.segments]


def ids_of(*chunks: PendingChunk) -> dict[str, tuple[int, ...]]:
    return {one.key: one.token_ids for one in chunks}


def test_a_chunk_that_nothing_fits_before_shows_nothing() -> None:
    alone, long = chunk(0, 50, (1,)), chunk(1, 60)
    assert prompts_of_group([alone], ids_of(alone, long), shaped(100, 100)) == []


def test_what_stands_before_a_chunk_stands_behind_it_the_other_time() -> None:
    group = [chunk(number, 3 + number) for number in range(5)]
    forwards, backwards = (one.prompt for one in prompts_of_group(group, ids_of(*group), shaped()))
    for prompt in (forwards, backwards):
        assert prompt.ids[:2] == (90, 91)
        for segment in prompt.segments:
            assert prompt.ids[segment.start : segment.stop] == group[int(str(segment.key))].token_ids
            assert prompt.ids[segment.stop] == 92
    assert [one.key for one in forwards.segments] == [one.key for one in reversed(backwards.segments)]


@given(count=st.integers(1, 40), times=st.sampled_from((1, 2, 4)))
def test_every_chunk_is_in_so_many_prompts(count: int, times: int) -> None:
    group = [chunk(number, 1 + number % 3, (99,)) for number in range(count)]
    prompts = prompts_of_group(group, ids_of(*group, chunk(99, 5)), shaped(times=times))
    places = [places_in(prompt) for prompt in prompts]
    assert all(len(set(keys)) == len(keys) for keys in places)
    seen = Counter(key for keys in places for key in keys if key != 99)
    assert seen == dict.fromkeys(range(count), min(max(times, 2), factorial(count)))
    assert len({tuple(keys) for keys in places}) == len(places)
    assert max(map(len, places)) <= max(MOST_TOGETHER, (count + 1) // 2)
    assert times == 1 or {one.known for one in prompts} == {1}


@given(count=st.integers(LEAST_TOGETHER, 40))
def test_four_prompts_are_the_two_and_two_more(count: int) -> None:
    group = [chunk(number, 1 + number % 3) for number in range(count)]
    two, four = (prompts_of_group(group, ids_of(*group), shaped(times=times)) for times in (2, 4))
    assert four[: len(two)] == two
    orders = [places_in(prompt) for prompt in four]
    assert sorted(orders) == sorted(order[::-1] for order in orders)


@given(count=st.integers(LEAST_TOGETHER, 40))
def test_half_of_the_chunks_are_computed_once_more_behind_the_other_half(count: int) -> None:
    """Each chunk is computed once behind a third of a prompt's chunks or more, and somewhere before it is known."""
    group = [chunk(number, 1) for number in range(count)]
    before, prompts = defaultdict[int, list[float]](list), prompts_of_group(group, ids_of(*group), shaped(times=1))
    for one in prompts:
        keys = places_in(one)
        assert one.known == 1 or all(before[key] for key in keys[: one.known])
        for place, key in list(enumerate(keys))[one.known :]:
            before[key].append(place / len(keys))
    assert before.keys() >= set(range(count))
    assert min(max(places) for places in before.values()) >= 1 / 3
    assert sum(map(len, before.values())) <= 1.5 * count


def test_the_second_prompts_begin_with_what_stands_late_in_the_first() -> None:
    group = [chunk(number, 2) for number in range(MOST_TOGETHER + 4)]
    prompts = prompts_of_group(group, ids_of(*group), shaped(times=1))
    assert [one.known for one in prompts] == [1, 1, 4, 6]
    assert [places_in(one) for one in prompts] == [
        list(range(10)),
        list(range(10, 20)),
        [18, 16, 8, 6, 14, 12, 10, 4, 2, 0],
        [19, 17, 15, 9, 7, 5, 13, 11, 3, 1],
    ]


def test_the_chunks_of_a_large_group_stand_behind_others_the_second_time() -> None:
    """And none is among the first five both times."""
    group = [chunk(number, 1) for number in range(32)]
    prompts = prompts_of_group(group, ids_of(*group), shaped())
    before: dict[str, list[set[str]]] = defaultdict(list)
    for one in prompts:
        keys = [str(place.key) for place in one.prompt.segments]
        for place, key in enumerate(keys):
            before[key].append(set(keys[:place]))
    for first, second in before.values():
        assert max(len(first), len(second)) >= 5
        assert len(first & second) <= min(len(first), len(second)) / 2


def test_an_instruction_without_room_is_left_out() -> None:
    group = [chunk(number, 10) for number in range(2)]
    for room, begin in ((23, (90, 91)), (22, (90,))):
        for prompt, _ in prompts_of_group(group, ids_of(*group), shaped(room)):
            assert prompt.ids[: prompt.segments[0].start] == begin


def test_a_small_group_stands_behind_neighbours_that_fit() -> None:
    stored = [chunk(number, 10 * number) for number in range(1, 6)]
    alone = chunk(0, 10, (1, 5, 2, 3, 4))
    ids = ids_of(alone, *stored)
    ((prompt, _),) = prompts_of_group([alone], ids, shaped())
    assert [one.key for one in prompt.segments] == ["001", "005", "002", "000"]
    assert len(prompt.segments) == LEAST_TOGETHER
    ((prompt, _),) = prompts_of_group([alone], ids, shaped(60, instruction=()))
    assert [one.key for one in prompt.segments] == ["001", "002", "000"], "the fifth is too long, and so is the third"


def test_neighbours_before_a_small_group_are_computed() -> None:
    """No prompt before shows what others change in them."""
    stored, group = chunk(9, 5), [chunk(number, 5, (9,)) for number in range(3)]
    prompts = prompts_of_group(group, ids_of(stored, *group), shaped(times=1))
    assert [(places_in(one), one.known) for one in prompts] == [([9, 0, 1, 2], 1), ([9, 2, 1, 0], 1)]


def test_a_long_chunk_does_not_stand_behind_long_ones() -> None:
    """Full prefill takes too long then, however much the model could see."""
    others = [chunk(number, tokens) for number, tokens in ((1, 9_000), (2, 3_000), (3, 3_000))]
    alone = chunk(0, 9_000, (1, 2, 3))
    ((prompt, _),) = prompts_of_group([alone], ids_of(alone, *others), shaped(100_000, 4_096))
    assert [one.key for one in prompt.segments] == ["002", "000"]


def test_a_chunk_whose_neighbours_are_all_too_long_stands_behind_one() -> None:
    """It would never be preprocessed otherwise."""
    others = [chunk(number, 5_000) for number in (1, 2)]
    alone = chunk(0, 5_000, (1, 2))
    ((prompt, _),) = prompts_of_group([alone], ids_of(alone, *others), shaped(32_000, 4_096))
    assert [one.key for one in prompt.segments] == ["001", "000"]
