"""Prompts that are proposed while a search goes on: the right one is there at once, of a wrong one nothing is left."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from corpus import SHORT, rag_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model
from waiting import unending, wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.engine import speculation as speculation_module
from fused_kv_llm.errors import FusedKVError, PromptError, PromptTooLongError
from fused_kv_llm.serving import RequestState, loop_of

QUESTION = "What about the ferries?"
PROMPTS = [rag_prompt([SHORT[at] for at in chosen], QUESTION) for chosen in [(0, 1), (0, 2), (3, 4), (5,)]]


def make_engine(folder: Path, **options: Any) -> FusedKVEngine:
    options = {"preprocessing": "none", "recompute_ratio": 0.3, "prefix_cache_bytes": 2**26, **options}
    engine = FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32", **options)
    engine.build_kv_cache(SHORT[:6], progress=False)
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    with make_engine(tmp_path_factory.mktemp("speculation")) as made:
        yield made


@pytest.fixture
def answers(engine: FusedKVEngine) -> dict[str, list[int]]:
    engine.clear_prefix_cache()
    found = {prompt: engine.generate(prompt, max_tokens=12).token_ids for prompt in PROMPTS}
    engine.clear_prefix_cache()
    return found


def scheduler_of(engine: FusedKVEngine) -> Any:
    return loop_of(engine.model).scheduler


def held(engine: FusedKVEngine) -> list[Any]:
    return [one for one in scheduler_of(engine).requests() if one.state is RequestState.HELD]


def wait_until_held(engine: FusedKVEngine) -> None:
    wait_until(lambda: bool(held(engine)))


def wait_until_none(engine: FusedKVEngine) -> None:
    # The last step tells the request's end before it lets go of it.
    wait_until(lambda: loop_of(engine.model)._open == 0 and not scheduler_of(engine).requests())


def test_a_proposal_that_is_right_goes_on_as_the_same_request(
    engine: FusedKVEngine, answers: dict[str, list[int]]
) -> None:
    with engine.speculate(max_tokens=12) as speculation:
        assert speculation.propose(PROMPTS[0])
        wait_until_held(engine)
        request = held(engine)[0]
        assert not request.handle.done
        assert request.handle._items.empty()
        speculation.finish(PROMPTS[0])
    handle = engine.submit(PROMPTS[0], max_tokens=12)
    assert handle is request.handle
    answer = handle.result()
    assert answer.token_ids == answers[PROMPTS[0]]
    report = answer.report
    assert (report.speculation, report.speculations_dropped) == ("confirmed", 0)
    assert 0 < report.search_hidden_s <= report.search_s
    assert report.ttft_s < report.search_hidden_s


def test_a_wrong_proposal_is_dropped_and_the_answer_is_the_right_ones(
    engine: FusedKVEngine, answers: dict[str, list[int]]
) -> None:
    for wait in (False, True):
        with engine.speculate(max_tokens=12) as speculation:
            speculation.propose(PROMPTS[0])
            if wait:
                wait_until_held(engine)
            speculation.finish(PROMPTS[2])
        answer = engine.generate(PROMPTS[2], max_tokens=12)
        assert answer.token_ids == answers[PROMPTS[2]]
        assert (answer.report.speculation, answer.report.speculations_dropped) == ("wrong", 1)
        assert answer.report.search_hidden_s == 0
    wait_until_none(engine)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_answers_are_those_of_the_last_stage(engine: FusedKVEngine, ratio: float) -> None:
    engine.clear_prefix_cache()
    options: dict[str, Any] = {"max_tokens": 8, "recompute_ratio": ratio}
    want = {prompt: engine.generate(prompt, **options).token_ids for prompt in PROMPTS}
    engine.clear_prefix_cache()

    @settings(max_examples=15)
    @given(st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from([0.0, 0.004, 0.05])), min_size=1, max_size=4))
    def check(stages: list[tuple[str, float]]) -> None:
        def search() -> Iterator[str]:
            for prompt, delay_s in stages:
                yield prompt
                time.sleep(delay_s)

        # An answer is there a moment before its request is off the books.
        wait_until(lambda: not engine.is_busy)
        answer = engine.submit_staged(search(), **options).result()
        assert answer.token_ids == want[stages[-1][0]]
        changes = sum(one[0] != other[0] for one, other in pairwise(stages))
        assert answer.report.speculations_dropped == changes
        assert answer.report.speculation == ("corrected" if changes else "confirmed")

    check()
    wait_until_none(engine)


def test_nothing_is_left_of_a_wrong_proposal(engine: FusedKVEngine) -> None:
    engine.clear_prefix_cache()
    before, pages = engine.store._parts.uses.counters(), engine.requests.context.pages
    with engine.speculate(max_tokens=12) as speculation:
        speculation.propose(PROMPTS[0])
        wait_until_held(engine)
        cache = held(engine)[0].answer.prompt.cache
        assert cache.nbytes > 0
    wait_until_none(engine)
    assert cache.nbytes == 0
    assert engine.requests.prefixes.num_nodes == 0
    assert engine.store._parts.uses.counters() == before
    assert pages is None or pages.nbytes == 0
    assert loop_of(engine.model)._open == 0
    assert not loop_of(engine.model)._provisional


def test_a_proposal_that_was_right_counts_as_a_request_does(engine: FusedKVEngine) -> None:
    def hits() -> int:
        return sum(engine.store._parts.uses.counters().hits.values())

    engine.clear_prefix_cache()
    before = hits()
    engine.generate(PROMPTS[0], max_tokens=2)
    plain = hits() - before
    engine.clear_prefix_cache()
    engine.submit_staged([PROMPTS[2], PROMPTS[0]], max_tokens=2).result()
    assert hits() - before - plain == plain > 0
    assert engine.requests.prefixes.num_nodes > 0


def test_what_both_prompts_begin_with_is_kept(engine: FusedKVEngine) -> None:
    engine.clear_prefix_cache()
    with engine.speculate(max_tokens=4, recompute_ratio=0.0) as speculation:
        speculation.propose(PROMPTS[0])
        wait_until_held(engine)
        speculation.finish(PROMPTS[1])
    report = engine.generate(PROMPTS[1], max_tokens=4, recompute_ratio=0.0).report
    shared = len(engine.token_ids(SHORT[0]))
    # The first chunk of both, and not the second one.
    assert shared - 4 <= report.prefix_cache_tokens <= shared + 40
    wait_until_none(engine)


def test_a_failing_search_drops_what_it_proposed(engine: FusedKVEngine) -> None:
    for number in range(3):

        def search(stop: int = number) -> Iterator[str]:
            yield from PROMPTS[:stop]
            raise OSError("the index is gone")

        with pytest.raises(OSError, match="the index is gone"):
            engine.submit_staged(search())
        wait_until_none(engine)
    with pytest.raises(PromptError, match="no prompt"):
        engine.submit_staged([])


def test_an_abandoned_search_drops_what_it_proposed(engine: FusedKVEngine) -> None:
    speculation = engine.speculate()
    speculation.propose(PROMPTS[0])
    wait_until_held(engine)
    del speculation
    gc.collect()
    wait_until_none(engine)


def test_a_search_that_proposed_nothing_is_not_wrong(engine: FusedKVEngine) -> None:
    with engine.speculate(max_tokens=4) as speculation:
        speculation.finish(PROMPTS[0])
    assert engine.generate(PROMPTS[0], max_tokens=4).report.speculation == ""


def test_a_prompt_that_is_never_asked_is_dropped(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_module, "_UNASKED_S", 0.2)
    with engine.speculate(max_tokens=4) as speculation:
        speculation.propose(PROMPTS[0])
        speculation.finish(PROMPTS[0])
    wait_until_none(engine)
    assert engine.generate(PROMPTS[0], max_tokens=4).report.speculation in ("", "off")


def test_a_prompt_that_does_not_fit_fails_when_it_is_asked(engine: FusedKVEngine) -> None:
    long = "ferry " * 5000
    with pytest.raises(PromptTooLongError):
        engine.submit_staged([PROMPTS[0], long]).result()
    assert len(engine.submit_staged([long, PROMPTS[0]], max_tokens=2).result().token_ids) == 2
    wait_until_none(engine)


def test_nothing_is_proposed_beside_other_work(
    engine: FusedKVEngine, answers: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = engine.submit(PROMPTS[3], max_tokens=200, constraint=unending)
    with engine.speculate(max_tokens=12) as speculation:
        with monkeypatch.context() as patched:
            # Not even rendered, which holds the interpreter.
            patched.delattr(speculation_module.PromptRenderer, "render")
            assert not speculation.propose(PROMPTS[0])
        speculation.finish(PROMPTS[0])
    answer = engine.generate(PROMPTS[0], max_tokens=12)
    other.cancel()
    assert (answer.token_ids, answer.report.speculation) == (answers[PROMPTS[0]], "off")


def test_a_proposal_makes_way_for_who_asks(tmp_path: Path) -> None:
    with make_engine(tmp_path, max_num_seqs=1) as engine:
        want = [engine.generate(prompt, max_tokens=5).token_ids for prompt in PROMPTS[:2]]
        engine.clear_prefix_cache()
        with engine.speculate(max_tokens=5) as speculation:
            speculation.propose(PROMPTS[0])
            wait_until_held(engine)
            assert engine.generate(PROMPTS[1], max_tokens=5).token_ids == want[1]
            assert not held(engine)
            speculation.finish(PROMPTS[0])
        answer = engine.generate(PROMPTS[0], max_tokens=5)
    assert (answer.token_ids, answer.report.speculation) == (want[0], "off")


def test_a_proposal_does_not_fill_the_queue(tmp_path: Path) -> None:
    with make_engine(tmp_path, max_num_seqs=1, max_queued=1) as engine:
        speculation = engine.speculate()
        speculation.propose(PROMPTS[0])
        handles = [engine.submit(prompt, max_tokens=2) for prompt in PROMPTS[1:3]]
        assert all(handle.result().token_ids for handle in handles)
        speculation.cancel()


def test_other_terms_of_the_answer_are_those_of_the_call(engine: FusedKVEngine) -> None:
    engine.clear_prefix_cache()
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.9, "seed": 5, "stop": ["q"]}
    want = engine.generate(PROMPTS[0], **options).token_ids
    engine.clear_prefix_cache()
    for speculated, outcome in [
        ({"seed": 5}, "confirmed"),
        ({"seed": 5, "max_tokens": 3}, "wrong"),
        ({"seed": 5, "recompute_ratio": 0.7}, "wrong"),
    ]:
        with engine.speculate(**speculated) as speculation:
            speculation.propose(PROMPTS[0])
            speculation.finish(PROMPTS[0])
        answer = engine.generate(PROMPTS[0], **options)
        assert (answer.token_ids, answer.report.speculation) == (want, outcome)
        engine.clear_prefix_cache()


def test_tenants_do_not_take_up_each_others_proposals(tmp_path: Path) -> None:
    model = tiny_model()
    made = [FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, dtype="float32",
                          preprocessing="none", tenant=name) for name in ("a", "b")]  # fmt: skip
    with made[0], made[1]:
        for one in made:
            one.build_kv_cache(SHORT[:3], progress=False)
        with made[0].speculate(max_tokens=4) as speculation:
            speculation.propose(PROMPTS[0])
            speculation.finish(PROMPTS[0])
        assert made[1].generate(PROMPTS[0], max_tokens=4).report.speculation == ""
        assert made[0].generate(PROMPTS[0], max_tokens=4).report.speculation in ("confirmed", "off")


def test_an_engine_that_closes_ends_its_proposals(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        speculation = engine.speculate()
        speculation.propose(PROMPTS[0])
        loop = loop_of(engine.model)
    assert loop._open == 0
    assert not speculation.propose(PROMPTS[1])


def test_searches_of_many_threads(engine: FusedKVEngine, answers: dict[str, list[int]]) -> None:
    errors = list[str]()

    def ask(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(8):
            stages = [drawn.choice(PROMPTS) for _ in range(drawn.randint(1, 3))]

            def search(stages: list[str] = stages) -> Iterator[str]:
                for stage in stages:
                    yield stage
                    time.sleep(drawn.random() * 0.02)

            handle = engine.submit_staged(search(), max_tokens=12)
            if drawn.random() < 0.3:
                handle.cancel()
            elif handle.result().token_ids != answers[stages[-1]]:
                errors.append(stages[-1])

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    wait_until_none(engine)
    assert loop_of(engine.model)._open == 0
    assert not loop_of(engine.model)._provisional


def test_ingestion_goes_on_while_a_prompt_is_held(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine, engine.speculate(max_tokens=4) as speculation:
        assert speculation.propose(PROMPTS[0])
        wait_until_held(engine)
        ingesting = threading.Thread(target=engine.build_kv_cache, args=([SHORT[6]],), kwargs={"progress": False})
        ingesting.start()
        ingesting.join(30)
        is_stuck = ingesting.is_alive()
        speculation.cancel()
        ingesting.join()
    assert not is_stuck


def test_a_constraint_can_neither_propose_nor_ask_what_was_proposed(engine: FusedKVEngine) -> None:
    errors = list[BaseException]()

    def asks(ids: Any, logits: Any) -> Any:
        for call in (lambda: engine.submit(PROMPTS[1]), lambda: engine.speculate().propose(PROMPTS[2])):
            try:
                call()
            except FusedKVError as error:
                errors.append(error)
        return logits

    with engine.speculate(max_tokens=4) as speculation:
        speculation.propose(PROMPTS[1])
        wait_until_held(engine)
        speculation.finish(PROMPTS[1])
        engine.generate(PROMPTS[0], max_tokens=1, constraint=asks)
    assert len(errors) == 2
    assert engine.generate(PROMPTS[1], max_tokens=4).token_ids
