"""What goes wrong around requests that share steps: each caller learns of it, the others go on, nothing is left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from waiting import exit_status, wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import DeadlineError, EngineClosedError, FusedKVError, StepFailedError
from fused_kv_llm.online import Request, fusion
from fused_kv_llm.serving import StepLoop, means
from fused_kv_llm.serving.scheduler import Scheduler
from fused_kv_llm.serving.waiting import WaitingRequests

PROMPT = rag_prompt(SHORT[:3], "Which ferry is the largest?")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    with FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, dtype="float32", preprocessing="none"
    ) as made:
        made.build_kv_cache(SHORT[:4], progress=False)
        yield made


def loop_of(engine: FusedKVEngine) -> StepLoop:
    return engine.requests._loop


class SlowPlans:
    """Holds plans up until it is told to let them go; notes which requests are open."""

    def __init__(self, engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.planning, self.ended = threading.Event(), 0, 0
        self._plan = engine.requests.planner.plan
        monkeypatch.setattr(engine.requests.planner, "plan", self.plan)

    def plan(self, *args: Any, **options: Any) -> Request:
        self.planning += 1
        assert self.go.wait(10)
        try:
            return self._plan(*args, **options)
        finally:
            self.ended += 1


def open_chunks(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return what is filled with the requests whose chunks are open."""
    found, create, close = set[int](), Request.__init__, Request.close

    def created(self: Request, *args: Any) -> None:
        create(self, *args)
        found.add(id(self))

    def closed(self: Request) -> None:
        found.discard(id(self))
        close(self)

    monkeypatch.setattr(Request, "__init__", created)
    monkeypatch.setattr(Request, "close", closed)
    return found


def test_a_step_that_goes_on_failing_ends_the_request_in_it_and_no_others(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, run, failing = open_chunks(monkeypatch), means.forward_ragged, threading.Event()

    def run_or_fail(loaded: Any, parts: Any) -> Any:
        if failing.is_set() and any(part.cache.get_max_length() > 1000 for part in parts):
            raise MemoryError("no memory for this step")
        return run(loaded, parts)

    monkeypatch.setattr(means, "forward_ragged", run_or_fail)
    first = engine.submit(PROMPT, max_tokens=1500)
    first.wait_for_first()
    slow = SlowPlans(engine, monkeypatch)
    second = engine.submit(PROMPT, max_tokens=3)
    wait_until(lambda: slow.planning == 1)
    failing.set()
    # It is planned again before it is given up.
    wait_until(lambda: slow.planning == 2)
    slow.go.set()
    with pytest.raises(StepFailedError) as caught:
        first.result()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert len(second.result().token_ids) == 3
    wait_until(lambda: loop_of(engine)._open == 0)
    assert not chunks


def test_what_fails_at_the_end_of_a_request_is_told(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> None:
        raise OSError("nothing can be learnt")

    monkeypatch.setattr(engine.requests, "answered", fail)
    ended = list[BaseException | None]()

    def ask() -> None:
        try:
            engine.generate(PROMPT, max_tokens=3)
        except OSError as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(10)
    assert len(ended) == 1
    monkeypatch.undo()
    assert engine.generate(PROMPT, max_tokens=3).token_ids
    assert loop_of(engine)._open == 0


def test_waiting_for_a_slow_plan_past_the_deadline_costs_nothing(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, steps, step = SlowPlans(engine, monkeypatch), 0, Scheduler.step

    def counted(self: Scheduler) -> None:
        nonlocal steps
        steps += 1
        step(self)

    monkeypatch.setattr(Scheduler, "step", counted)
    late = engine.submit(PROMPT, timeout_s=0.05)
    time.sleep(0.5)
    assert steps < 20
    slow.go.set()
    with pytest.raises(DeadlineError):
        late.result()


def test_closing_waits_for_chunks_that_are_being_opened(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, slow = open_chunks(monkeypatch), SlowPlans(engine, monkeypatch)
    handle = engine.submit(PROMPT)
    wait_until(lambda: slow.planning == 1)
    closing = threading.Thread(target=engine.close)
    closing.start()
    time.sleep(0.3)
    assert closing.is_alive()
    slow.go.set()
    closing.join(10)
    assert not closing.is_alive()
    assert slow.ended == 1
    assert not chunks
    with pytest.raises(EngineClosedError):
        handle.result()


def test_a_request_that_comes_while_an_engine_closes_is_refused(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine.requests.submit
    # Engines of other tests may have theirs.
    before = set(threading.enumerate())

    def close_before(*args: Any) -> Any:
        engine.close()
        return submit(*args)

    monkeypatch.setattr(engine.requests, "submit", close_before)
    with pytest.raises(EngineClosedError):
        engine.submit(PROMPT).result()
    after = set(threading.enumerate()) - before
    assert not [thread.name for thread in after if thread.name.startswith("fused-kv-read")]


def test_a_request_that_cannot_get_memory_closes_its_chunks(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = open_chunks(monkeypatch)

    def fail(*args: Any) -> None:
        raise MemoryError("no memory for this request")

    with monkeypatch.context() as patch:
        patch.setattr(fusion, "RequestKV", fail)
        with pytest.raises(StepFailedError) as caught:
            engine.generate(PROMPT)
        assert isinstance(caught.value.__cause__, MemoryError)
    wait_until(lambda: loop_of(engine)._open == 0)
    assert not chunks


def test_an_answer_can_be_asked_for_again(engine: FusedKVEngine) -> None:
    handle = engine.submit(PROMPT, max_tokens=5)
    assert handle.result().token_ids == handle.result().token_ids
    handle = engine.submit(PROMPT, max_tokens=1500)
    handle.cancel()
    for _ in range(2):
        with pytest.raises(FusedKVError):
            handle.result()


def test_messages_may_be_changed_once_they_were_submitted(engine: FusedKVEngine) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    want = engine.generate(messages, max_tokens=4).token_ids
    with engine.model_lock:
        handles = [engine.submit(messages, max_tokens=4) for _ in range(10)]
        messages[0]["content"] = "Something else."
        messages.append({"role": "assistant", "content": "So it is."})
    assert [handle.result().token_ids for handle in handles] == [want] * 10


def test_a_constraint_that_asks_the_engine_is_refused(engine: FusedKVEngine) -> None:
    def asks(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        engine.generate("hello", max_tokens=1)
        return logits

    handle = engine.submit(PROMPT, constraint=asks, timeout_s=5)
    ended = threading.Event()
    errors = list[BaseException]()

    def wait() -> None:
        try:
            handle.result()
        except FusedKVError as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(20)
    assert "constraint" in str(errors[0])


def test_a_constraint_may_close_the_engine(engine: FusedKVEngine) -> None:
    def closes(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        if len(ids) == 2:
            engine.close()
        return logits

    handles = [engine.submit(PROMPT, max_tokens=1000), engine.submit(PROMPT, constraint=closes, max_tokens=1000)]
    for handle in handles:
        with pytest.raises(EngineClosedError):
            handle.result()


def waiting_request(tenant: str, number: int) -> Any:
    home = SimpleNamespace(tenant=tenant, limits=SimpleNamespace(reorder_window=32))
    terms = SimpleNamespace(priority=0)
    return SimpleNamespace(home=home, terms=terms, arrived_s=number, max_tokens=100, cached_ratio=None, overtaken=0)


def test_a_tenant_that_was_served_alone_does_not_wait_for_all_of_a_new_one() -> None:
    waiting = WaitingRequests()
    for number in range(50):
        waiting.add(waiting_request("old", number))
        assert waiting.take() is not None
    for number in range(50, 80):
        waiting.add(waiting_request("new", number))
    waiting.add(waiting_request("old", 80))
    taken = [waiting.take().home.tenant for _ in range(4)]  # type: ignore[union-attr]
    assert "old" in taken


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_forked_while_requests_run_can_answer(engine: FusedKVEngine) -> None:
    torch.set_num_threads(1)
    want = engine.generate(PROMPT, max_tokens=3).token_ids
    handle = engine.submit(PROMPT, max_tokens=1500)
    handle.wait_for_first()
    wait_until(engine.model_lock.locked)
    child = os.fork()
    if child == 0:
        try:
            found = engine.submit(PROMPT, max_tokens=3).result().token_ids
            os._exit(0 if found == want else 1)
        finally:
            os._exit(2)
    handle.cancel()
    assert exit_status(child) == 0
