"""Requests that share steps: each gets the answer that it gets alone, and nothing is left of those that end early."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from held_memory import caches_in_use
from models import smollm2_tokenizer, tiny_model
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import (
    ConfigError,
    DeadlineError,
    EngineClosedError,
    PromptTooLongError,
    QueueFullError,
    RequestCancelledError,
)
from fused_kv_llm.model import FusedCache, ragged

QUESTIONS = [f"What about the ferries, question {number}?" for number in range(12)]


def make_engine(folder: Path, **options: Any) -> FusedKVEngine:
    options = {
        "preprocessing": "none",
        "recompute_ratio": 0.3,
        "max_batched_rows": 24,
        "prefix_cache_bytes": 0,
        **options,
    }
    engine = FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32", **options)
    engine.build_kv_cache(SHORT[:6], progress=False)
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    with make_engine(tmp_path_factory.mktemp("serving")) as made:
        yield made


def prompts(count: int) -> list[str]:
    """Return prompts of different lengths and chunks."""
    drawn = random.Random(count)
    return [rag_prompt(drawn.sample(SHORT[:6], 1 + number % 5), QUESTIONS[number]) for number in range(count)]


OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"max_tokens": 3, "recompute_ratio": 0.0},
    {"max_tokens": 25, "recompute_ratio": 1.0},
    {"max_tokens": 20, "temperature": 1.2, "seed": 3, "selector": "qcfuse"},
    {"max_tokens": 16, "selector": "cacheblend"},
]


def test_answers_do_not_depend_on_who_else_is_answered(engine: FusedKVEngine) -> None:
    asked = [(prompt, OPTIONS[number % len(OPTIONS)]) for number, prompt in enumerate(prompts(12))]
    alone = [engine.generate(prompt, **options) for prompt, options in asked]
    handles = [engine.submit(prompt, **options) for prompt, options in asked]
    together = [handle.result() for handle in handles]
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        assert one.report.recomputed_tokens == other.report.recomputed_tokens
    # They did share steps: without, a step would be as short as alone.
    assert {"queue", "step", "fuse", "first_token"} <= set(together[-2].report.seconds)


def test_rows_of_several_requests_are_computed_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, run_model = list[int](), ragged.run_model

    def counted(model: Any, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(ids.shape[1])
        return run_model(model, ids, *args)

    monkeypatch.setattr(ragged, "run_model", counted)
    # So few that no chunk has more recomputed tokens than there is room for beside answers; it would not be cut.
    with make_engine(tmp_path, reorder_window=0, recompute_ratio=0.1) as engine:
        for handle in [engine.submit(prompt, max_tokens=60) for prompt in prompts(8)]:
            handle.result()
    assert max(rows) <= 24
    assert 8 in rows
    assert any(row > 8 for row in rows)


def test_an_answer_of_one_token_is_streamed(engine: FusedKVEngine) -> None:
    want = engine.generate(prompts(1)[0], max_tokens=1).token_ids
    assert [piece.token_id for piece in engine.stream(prompts(1)[0], max_tokens=1)] == want
    assert len(want) == 1


def test_a_stop_string_and_a_constraint_end_only_their_own_answer(engine: FusedKVEngine) -> None:
    plain = engine.generate(prompts(3)[0], max_tokens=20)
    stop = plain.text[8:11]

    def broken(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        if len(ids) == 4:
            raise ValueError("a broken constraint")
        return logits

    stopped = engine.submit(prompts(3)[0], max_tokens=20, stop=stop)
    failing = engine.submit(prompts(3)[1], max_tokens=20, constraint=broken)
    whole = engine.submit(prompts(3)[0], max_tokens=20)
    assert stopped.result().text == plain.text[: plain.text.index(stop)]
    with pytest.raises(ValueError, match="a broken constraint"):
        failing.result()
    assert whole.result().token_ids == plain.token_ids


def test_too_many_requests_are_refused(tmp_path: Path) -> None:
    with make_engine(tmp_path, max_num_seqs=2, max_queued=3) as engine, engine.model_lock:
        handles = [engine.submit(prompt) for prompt in prompts(5)]
        with pytest.raises(QueueFullError, match=r"5 requests .* max_queued"):
            engine.submit(prompts(1)[0])
        for handle in handles:
            handle.cancel()


def test_no_more_run_at_once_than_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tmp_path, max_num_seqs=3) as engine:
        most = most_caches(engine, monkeypatch, prompts(9))
    assert most == 3


def test_no_more_kv_is_held_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tmp_path, kv_pool_bytes=1) as engine:
        # One is always let in.
        assert most_caches(engine, monkeypatch, prompts(5)) == 1


def most_caches(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> int:
    """Answer prompts at once; return how many caches there were at a time."""
    alive, most, create, release = set[int](), 0, FusedCache.__init__, FusedCache.release

    def counted(self: FusedCache, *args: Any) -> None:
        nonlocal most
        create(self, *args)
        alive.add(id(self))
        most = max(most, len(alive))

    def released(self: FusedCache) -> None:
        alive.discard(id(self))
        release(self)

    monkeypatch.setattr(FusedCache, "__init__", counted)
    monkeypatch.setattr(FusedCache, "release", released)
    for handle in [engine.submit(prompt, max_tokens=15) for prompt in asked]:
        handle.result()
    assert not alive
    return most


def test_a_request_has_until_its_deadline(engine: FusedKVEngine) -> None:
    with engine.model_lock:
        late = engine.submit(prompts(1)[0], timeout_s=0.05)
        time.sleep(0.2)
    with pytest.raises(DeadlineError, match=r"within 0.05 s"):
        late.result()
    assert engine.generate(prompts(1)[0], max_tokens=3, timeout_s=60).text
    for wrong in (0, -1, "soon"):
        with pytest.raises(ConfigError, match="timeout_s="):
            engine.submit("hello", timeout_s=wrong)  # type: ignore[arg-type]


def test_a_higher_priority_comes_first(tmp_path: Path) -> None:
    order = list[int]()
    with make_engine(tmp_path, max_num_seqs=1) as engine:
        with engine.model_lock:
            handles = [engine.submit(prompt, max_tokens=2, priority=-1) for prompt in prompts(6)]
            wait_until(lambda: len(engine.requests._loop.scheduler.waiting) <= 2)
            handles.append(engine.submit(prompts(1)[0], max_tokens=2, priority=5))
        threads = [threading.Thread(target=lambda n=n: (handles[n].result(), order.append(n))) for n in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Those whose chunks are open already go first.
    assert order.index(6) <= 4


def test_tenants_take_turns(tmp_path: Path) -> None:
    model, ended = tiny_model(), list[str]()
    options: dict[str, Any] = {"preprocessing": "none", "tokenizer": smollm2_tokenizer(), "max_num_seqs": 1}
    with (
        FusedKVEngine(model, kv_dir=tmp_path, tenant="many", **options) as many,
        FusedKVEngine(model, kv_dir=tmp_path, tenant="few", **options) as few,
    ):
        with many.model_lock:
            handles = [("many", many.submit(question, max_tokens=4)) for question in QUESTIONS]
            handles += [("few", few.submit(question, max_tokens=4)) for question in QUESTIONS[:2]]

        def wait(tenant: str, handle: Any) -> None:
            handle.result()
            ended.append(tenant)

        threads = [threading.Thread(target=wait, args=pair) for pair in handles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Twelve requests came before; few waits for those that were begun, and then for every other one.
    assert ended.index("few") <= 7
    assert len(ended) - 1 - ended[::-1].index("few") <= 9


def test_a_cancelled_request_ends_at_the_next_step(engine: FusedKVEngine) -> None:
    handle = engine.submit(prompts(2)[0], max_tokens=1500)
    pieces = handle.pieces()
    next(pieces)
    pieces.close()
    wait_until(lambda: handle.done)
    other = engine.submit(prompts(2)[1], max_tokens=1500)
    other.cancel()
    with pytest.raises(RequestCancelledError):
        other.result()


def test_asynchronous_answers(engine: FusedKVEngine) -> None:
    asked = prompts(6)
    alone = [engine.generate(prompt, max_tokens=10).text for prompt in asked]

    async def stream(prompt: str) -> str:
        return "".join([piece.text async for piece in engine.submit(prompt, max_tokens=10).pieces_async()])

    async def main() -> list[str]:
        whole = [engine.submit(prompt, max_tokens=10).result_async() for prompt in asked[:3]]
        found = await asyncio.gather(*whole, *(stream(prompt) for prompt in asked[3:]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream("a prompt that fits in no context " * 10_000), 0.0)
        with pytest.raises(PromptTooLongError):
            await engine.submit("a prompt that fits in no context " * 10_000).result_async()
        return [one if isinstance(one, str) else one.text for one in found]

    assert asyncio.run(main()) == alone


def test_closing_an_engine_ends_its_requests_and_no_others(tmp_path: Path) -> None:
    model, options = tiny_model(), {"preprocessing": "none", "tokenizer": smollm2_tokenizer(), "kv_dir": tmp_path}
    first, second = (FusedKVEngine(model, **options) for _ in range(2))
    ending, going_on = first.submit(QUESTIONS[0], max_tokens=1500), second.submit(QUESTIONS[0], max_tokens=300)
    ending.wait_for_first()
    first.close()
    with pytest.raises(EngineClosedError):
        ending.result()
    with pytest.raises(EngineClosedError):
        first.submit(QUESTIONS[0])
    assert going_on.result().finish_reason in ("length", "stop")
    second.close()


@pytest.mark.filterwarnings("ignore::fused_kv_llm.FusedKVWarning")
def test_a_chunk_that_is_damaged_delays_only_its_own_request(tmp_path: Path) -> None:
    with make_engine(tmp_path, store_misses=False) as engine:
        want = [engine.generate(prompt, max_tokens=8).token_ids for prompt in prompts(6)]
        engine.store.drop_memory()
        found = engine.chunk_id(SHORT[0])
        (file,) = [path for path in tmp_path.rglob("*") if path.is_file() and found and found in path.name]
        data = bytearray(file.read_bytes())
        data[-200] ^= 0xFF
        file.write_bytes(data)
        handles = [engine.submit(prompt, max_tokens=8) for prompt in prompts(6)]
        got = [handle.result() for handle in handles]
    damaged = [SHORT[0] in prompt for prompt in prompts(6)]
    assert any(damaged)
    assert not all(damaged)
    for one, other, is_damaged in zip(want, got, damaged, strict=True):
        assert is_damaged or one == other.token_ids
    assert any(answer.report.chunks_missed for answer in got)


def threads_besides_pools() -> list[str]:
    """Return the names of the threads that are not of a pool: those come as they are needed, up to its size."""
    pools = ("fused-kv-load", "fused-kv-plan", "fused-kv-read", "fused-kv-prefetch")
    return [thread.name for thread in threading.enumerate() if not thread.name.startswith(pools)]


def test_nothing_is_left_of_many_requests_that_come_and_go(engine: FusedKVEngine) -> None:
    drawn, asked = random.Random(0), prompts(12)
    want = [engine.generate(prompt, max_tokens=6).token_ids for prompt in asked]
    gc.collect()
    threads = len(threads_besides_pools())
    for _ in range(40):
        handles = list[tuple[int, Any, bool]]()
        for _ in range(8):
            number, leaves = drawn.randrange(12), drawn.random() < 0.4
            handles.append((number, engine.submit(asked[number], max_tokens=1500 if leaves else 6), leaves))
        for number, handle, leaves in handles:
            if leaves:
                time.sleep(drawn.random() * 0.004)
                handle.cancel()
            else:
                assert handle.result().token_ids == want[number]
    wait_until(lambda: engine.requests._loop._open == 0)
    assert caches_in_use(engine) == []
    assert len(threads_besides_pools()) <= threads + 1
    assert not engine.model_lock.locked()


def test_the_loop_ends_when_there_is_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_kv_llm.serving.step_loop._IDLE_S", 0.05)
    with make_engine(tmp_path) as engine:
        want = engine.generate(prompts(1)[0], max_tokens=3).token_ids
        wait_until(lambda: engine.requests._loop._thread is None)
        assert engine.generate(prompts(1)[0], max_tokens=3).token_ids == want


def test_an_engine_that_is_dropped_can_be_collected(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.generate(prompts(1)[0], max_tokens=3)
    engine.close()
    model = weakref.ref(engine.model)
    del engine
    wait_until(lambda: gc.collect() >= 0 and model() is None)
