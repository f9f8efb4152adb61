"""What is loaded and stored of a request, step by step."""

from __future__ import annotations

import pytest
from integrations.vllm.requests import (
    BLOCK,
    PROMPT,
    SPAN,
    SPAN_BLOCKS,
    block_caches,
    empty_step,
    first_step,
    identity,
    next_step,
    request,
    spans,
)

from fused_kv_vllm.prefix_store import PrefixStore
from fused_kv_vllm.scheduling import PrefixScheduler
from fused_kv_vllm.transfers import SpanBlocks

BLOCKS = [20, 21, 22, 23, 24, 25, 26]


@pytest.fixture
def scheduler(store: PrefixStore) -> PrefixScheduler:
    made = PrefixScheduler(store, BLOCK, SPAN_BLOCKS)
    made.identity = identity()
    return made


def store_spans(store: PrefixStore, count: int, salt: str | None = None) -> None:
    for number, span in enumerate(spans(salt=salt)[:count]):
        store.write(span, *block_caches().gather([2 * number, 2 * number + 1]))


def test_nothing_is_found_before_the_caches_are_known(store: PrefixStore) -> None:
    store_spans(store, 3)
    made = PrefixScheduler(store, BLOCK, SPAN_BLOCKS)
    assert made.matched(request(), 0) == 0
    assert made.step(first_step("a", BLOCKS, 0, len(PROMPT))).saves == ()
    made.identity = identity()
    assert made.matched(request(), 0) == 3 * SPAN


def test_a_new_prompt_is_stored_when_its_spans_are_complete(scheduler: PrefixScheduler) -> None:
    assert scheduler.matched(request(), 0) == 0
    scheduler.allocated(request(), BLOCKS, 0)
    first = scheduler.step(first_step("a", BLOCKS[:3], 0, SPAN + 3))
    assert first.loads == ()
    assert first.saves == (SpanBlocks(spans()[0], (20, 21)),)
    second = scheduler.step(next_step("a", BLOCKS[3:], SPAN + 3, 2 * SPAN))
    assert second.saves == (SpanBlocks(spans()[1], (22, 23)), SpanBlocks(spans()[2], (24, 25)))
    assert scheduler.step(next_step("a", None, len(PROMPT), 1)).saves == ()


def test_a_stored_prefix_is_loaded_and_not_stored_again(scheduler: PrefixScheduler, store: PrefixStore) -> None:
    store_spans(store, 2)
    assert scheduler.matched(request(), 0) == 2 * SPAN
    assert scheduler.matched(request(), 0) == 2 * SPAN
    scheduler.allocated(request(), BLOCKS, 2 * SPAN)
    step = scheduler.step(empty_step())
    assert step.is_idle
    (load,) = step.loads
    assert load.request_id == "a"
    assert load.spans == (SpanBlocks(spans()[0], (20, 21)), SpanBlocks(spans()[1], (22, 23)))
    rest = scheduler.step(first_step("a", BLOCKS, 2 * SPAN, SPAN + 3))
    assert rest.loads == ()
    assert not rest.is_idle
    assert rest.saves == (SpanBlocks(spans()[2], (24, 25)),)


def test_what_vllm_has_itself_is_not_loaded(scheduler: PrefixScheduler, store: PrefixStore) -> None:
    store_spans(store, 2)
    assert scheduler.matched(request(), BLOCK) == 2 * SPAN - BLOCK
    scheduler.allocated(request(), BLOCKS, 2 * SPAN - BLOCK)
    (load,) = scheduler.step(empty_step()).loads
    assert load.spans == (SpanBlocks(spans()[0], (21,), skipped=1), SpanBlocks(spans()[1], (22, 23)))
    assert scheduler.matched(request("b"), 2 * SPAN) == 0
    assert scheduler.matched(request("c"), 3 * SPAN) == 0


def test_what_vllm_has_itself_is_stored(scheduler: PrefixScheduler) -> None:
    assert scheduler.matched(request(), 2 * SPAN) == 0
    step = scheduler.step(first_step("a", BLOCKS, 2 * SPAN, SPAN + 3))
    assert [one.blocks for one in step.saves] == [(20, 21), (22, 23), (24, 25)]


def test_the_last_token_is_always_computed(scheduler: PrefixScheduler, store: PrefixStore) -> None:
    store_spans(store, 3)
    assert scheduler.matched(request(token_ids=PROMPT[: 2 * SPAN]), 0) == SPAN
    assert scheduler.matched(request("b", PROMPT[: 2 * SPAN + 1]), 0) == 2 * SPAN


def test_a_request_is_loaded_for_once(scheduler: PrefixScheduler, store: PrefixStore) -> None:
    """Otherwise a span that the index has and nobody can read would be asked for without end."""
    store_spans(store, 2)
    scheduler.matched(request(), 0)
    scheduler.allocated(request(), BLOCKS, 2 * SPAN)
    assert scheduler.matched(request(), 0) == 0
    scheduler.finished("a")
    assert scheduler.matched(request(), 0) == 2 * SPAN


def test_what_could_not_be_loaded_is_stored_again(scheduler: PrefixScheduler, store: PrefixStore) -> None:
    store_spans(store, 2)
    scheduler.matched(request(), 0)
    scheduler.allocated(request(), BLOCKS, 2 * SPAN)
    scheduler.step(empty_step())
    step = scheduler.step(first_step("a", BLOCKS, SPAN, 2 * SPAN + 3))
    assert [one.span.start for one in step.saves] == [SPAN, 2 * SPAN]


def test_a_request_that_begins_again_has_other_blocks(scheduler: PrefixScheduler) -> None:
    scheduler.matched(request(), 0)
    scheduler.step(first_step("a", BLOCKS[:3], 0, SPAN + 3))
    step = scheduler.step(next_step("a", [1, 2, 3, 4, 5, 6, 7], 0, len(PROMPT), resumed=True))
    assert [one.blocks for one in step.saves] == [(3, 4), (5, 6)]


def test_tenants_find_nothing_of_each_other(scheduler: PrefixScheduler, store: PrefixStore) -> None:
    store_spans(store, 3, salt="alice")
    assert scheduler.matched(request("a"), 0) == 0
    assert scheduler.matched(request("b", cache_salt="bob"), 0) == 0
    assert scheduler.matched(request("c", cache_salt="alice"), 0) == 3 * SPAN


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"prompt_is_token_ids": [True]},
    ],
)
def test_what_tokens_do_not_tell_is_left_alone(store: PrefixStore, changes: dict[str, object]) -> None:
    store_spans(store, 3)
    reasons: list[str] = []
    made = PrefixScheduler(store, BLOCK, SPAN_BLOCKS, on_refused=reasons.append)
    made.identity = identity()
    for name in ("a", "b"):
        assert made.matched(request(name, **changes), 0) == 0
        assert made.step(first_step(name, BLOCKS, 0, len(PROMPT))).saves == ()
    assert len(reasons) == 1


@pytest.mark.parametrize(("loads", "saves"), [(True, False), (False, True)])
def test_a_server_may_only_load_or_only_store(store: PrefixStore, loads: bool, saves: bool) -> None:
    store_spans(store, 1)
    made = PrefixScheduler(store, BLOCK, SPAN_BLOCKS, loads=loads, saves=saves)
    made.identity = identity()
    assert made.matched(request(), 0) == (SPAN if loads else 0)
    step = made.step(first_step("a", BLOCKS, 0, len(PROMPT)))
    assert [one.span.start for one in step.saves] == ([SPAN, 2 * SPAN] if saves else [])


def test_weights_that_were_replaced_find_nothing(scheduler: PrefixScheduler, store: PrefixStore) -> None:
    store_spans(store, 3)
    assert scheduler.matched(request(), 0) == 3 * SPAN
    scheduler.forget_weights()
    assert scheduler.matched(request(), 0) == 0
