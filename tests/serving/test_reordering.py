"""The order of the queue: what is cached most goes first, within a window, and no one waits for ever."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from corpus import SHORT, rag_prompt
from hypothesis import given
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model
from waiting import unending, wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.serving import loop_of
from fused_kv_llm.serving.served_request import ServedRequest
from fused_kv_llm.serving.waiting import WaitingRequests

OPTIONS: dict[str, Any] = {"dtype": "float32", "preprocessing": "none", "store_misses": False}


def queued(number: int, ratio: float | None, window: int, tenant: str = "", priority: int = 0) -> Any:
    home = SimpleNamespace(tenant=tenant, limits=SimpleNamespace(reorder_window=window))
    return SimpleNamespace(home=home, terms=SimpleNamespace(priority=priority), arrived_s=number, max_tokens=10,
                           cached_ratio=ratio, overtaken=0, number=number)  # fmt: skip


RATIOS = st.one_of(st.none(), st.floats(0, 100))


@given(
    arrivals=st.lists(st.tuples(RATIOS, st.integers(0, 2), st.sampled_from(["", "b"])), max_size=60),
    takes=st.lists(st.booleans(), max_size=60),
    window=st.integers(0, 5),
)
def test_nobody_is_overtaken_more_often_than_the_window_allows(
    arrivals: list[tuple[float | None, int, str]], takes: list[bool], window: int
) -> None:
    waiting, taken = WaitingRequests(), list[Any]()
    requests = [queued(number, ratio, window, tenant, priority)
                for number, (ratio, priority, tenant) in enumerate(arrivals)]  # fmt: skip
    coming = iter(requests)
    for take in [*takes, *([False] * len(requests)), *([True] * len(requests))]:
        if take:
            taken += [one for one in [waiting.take()] if one is not None]
        elif (one := next(coming, None)) is not None:
            waiting.add(one)
    assert sorted(one.number for one in taken) == list(range(len(requests)))
    for place, one in enumerate(taken):
        alike = [other for other in taken[:place]
                 if (other.terms.priority, other.home.tenant) == (one.terms.priority, one.home.tenant)]  # fmt: skip
        assert sum(other.number > one.number for other in alike) <= window


def test_the_most_cached_comes_first_among_one_tenants_requests() -> None:
    waiting = WaitingRequests()
    for number, ratio in enumerate([0.5, None, 9.0, 2.0, 9.0]):
        waiting.add(queued(number, ratio, 32))
    waiting.add(queued(5, 50.0, 32, priority=-1))
    order = [waiting.take().number for _ in range(6)]  # type: ignore[union-attr]
    assert order == [2, 4, 3, 0, 1, 5]


def taken_in_order(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch, prompts: list[str]) -> list[str]:
    """Have prompts answered that wait together, one at a time; return the order in which they left the queue."""
    taken, take = list[str](), WaitingRequests.take

    def noted(self: WaitingRequests) -> ServedRequest | None:
        request = take(self)
        if request is not None:
            taken.append(str(request.prompt_plan._prompt))
        return request

    monkeypatch.setattr(WaitingRequests, "take", noted)
    waiting = loop_of(engine.model).scheduler.waiting
    first = engine.submit("Wait a moment, please.", max_tokens=1500, constraint=unending)
    first.wait_for_first()
    handles = [engine.submit(prompt, max_tokens=1) for prompt in prompts]
    # Four are planned, and so out of the queue, before it is known what the others have.
    wait_until(lambda: len(waiting) == len(prompts) - 4 and waiting.unmeasured() is None)
    first.cancel()
    for handle in handles:
        handle.result()
    return taken[1:]


@pytest.mark.parametrize("window", [0, 32])
def test_prompts_whose_chunks_are_stored_are_answered_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    unknown = [f"{number} {rag_prompt([text.upper()])}" for number, text in enumerate(SHORT[:8])]
    stored = [f"{number} {rag_prompt(SHORT[number : number + 3])}" for number in range(3)]
    options = {**OPTIONS, "kv_dir": tmp_path, "tokenizer": smollm2_tokenizer(), "max_num_seqs": 1}
    with FusedKVEngine(tiny_model(), reorder_window=window, **options) as engine:
        engine.build_kv_cache(SHORT, progress=False)
        order = taken_in_order(engine, monkeypatch, [*unknown, *stored])
    assert sorted(order) == sorted([*unknown, *stored])
    assert set(order[4:7]) == set(stored) if window else order == [*unknown, *stored]


def test_what_earlier_prompts_have_left_counts_as_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The header is cached of every prompt: the last one's share is the least but for what it has left itself.
    texts = [f"{number}: {text} Tell me more." for number, text in enumerate(sorted(SHORT[:8], key=len))]
    with FusedKVEngine(tiny_model(), kv_dir=tmp_path, tokenizer=smollm2_tokenizer(), max_num_seqs=1,
                       **OPTIONS) as engine:  # fmt: skip
        engine.generate(texts[7], max_tokens=1)
        order = taken_in_order(engine, monkeypatch, texts)
    assert order.index(texts[7]) <= 4


def test_a_prompt_that_cannot_be_measured_fails_when_its_turn_comes(tmp_path: Path) -> None:
    from fused_kv_llm.errors import PromptError

    with FusedKVEngine(tiny_model(), kv_dir=tmp_path, tokenizer=smollm2_tokenizer(), max_num_seqs=1,
                       wrap_chat_template=False, **OPTIONS) as engine:  # fmt: skip
        first = engine.submit("Wait a moment, please.", max_tokens=1500, constraint=unending)
        first.wait_for_first()
        handles = [engine.submit(prompt, max_tokens=1) for prompt in ["", "One.", "", "Two.", "Three.", "", "Four."]]
        first.cancel()
        for number in (0, 2, 5):
            with pytest.raises(PromptError):
                handles[number].result()
        assert all(len(handles[number].result().token_ids) == 1 for number in (1, 3, 4, 6))
