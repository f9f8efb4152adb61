"""Padded answers: when they come depends on the prompt's length, not on what others have asked."""

from __future__ import annotations

import asyncio
import selectors
import statistics
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import SHORT, rag_prompt
from hypothesis import given
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.server import ServerConfig, create_app
from fused_kv_llm.server.padding import padded
from fused_kv_llm.serving import ServedRequest
from fused_kv_llm.store import RecomputeCost

PERIOD_S = 1.0


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes forward only when all wait for it."""

    def __init__(self) -> None:
        selector = selectors.SelectSelector()
        super().__init__(selector)
        self._now_s, select = 0.0, selector.select

        def wait(timeout: float | None = None) -> list[Any]:
            self._now_s += timeout or 0.0
            return select(0)

        selector.select = wait  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now_s


async def parts_at(seconds: list[float], error: Exception | None = None) -> AsyncGenerator[int]:
    for number, gap_s in enumerate(seconds):
        await asyncio.sleep(gap_s)
        yield number
    if error is not None:
        raise error


def delivered(ready_s: float, gaps_s: list[float], error: Exception | None = None) -> list[float]:
    """Return when a client gets the parts of an answer, and its end, by a clock that nothing disturbs."""
    times = []

    async def client() -> None:
        loop = asyncio.get_running_loop()
        try:
            async with aclosing(padded(parts_at([ready_s, *gaps_s], error), 0.0, PERIOD_S)) as parts:
                async for number in parts:
                    assert number == len(times)
                    times.append(loop.time())
        except ValueError:
            assert error is not None
        times.append(loop.time())

    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        runner.run(client())
    return times


Gaps = st.lists(st.floats(0, 3), max_size=6)


@given(st.floats(0.001, PERIOD_S), st.floats(0.001, PERIOD_S), Gaps)
def test_whether_it_was_ready_early_or_late_cannot_be_told(one_s: float, other_s: float, gaps_s: list[float]) -> None:
    times = delivered(one_s, gaps_s)
    assert times == pytest.approx(delivered(other_s, gaps_s))
    # All of the answer is shifted, so its own pace stays.
    expected = [PERIOD_S + sum(gaps_s[:number]) for number in range(len(gaps_s) + 1)]
    assert times == pytest.approx([*expected, expected[-1]])


@given(st.floats(0.001, 5), Gaps)
def test_late_answers_begin_at_the_next_multiple(ready_s: float, gaps_s: list[float]) -> None:
    first_s = delivered(ready_s, gaps_s)[0]
    assert first_s == pytest.approx(round(first_s))
    assert -1e-6 <= first_s - ready_s < PERIOD_S + 1e-6


def test_errors_are_held_as_answers_are() -> None:
    assert delivered(0.1, [0.2], ValueError()) == pytest.approx([1.0, 1.2, 1.2])


def test_whoever_leaves_ends_it() -> None:
    ended = []

    async def endless() -> AsyncGenerator[int]:
        try:
            while True:
                await asyncio.sleep(0.1)
                yield 1
        finally:
            ended.append(True)

    async def client() -> None:
        async with aclosing(padded(endless(), 0.0, PERIOD_S)) as parts:
            assert await anext(parts) == 1
        assert ended == [True]

    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        runner.run(client())


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FusedKVEngine]:
    """Give an engine that takes a millisecond for each token of a prompt, so that the clock shows reuse."""
    take = ServedRequest.take

    def slowly(self: ServedRequest, prompt: Any) -> None:
        time.sleep(0.001 * self.report.computed_tokens)
        take(self, prompt)

    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as made:
        made.corpus.cost.seconds = RecomputeCost((0, 512), (16, 512), [[0.016, 0.512], [0.016, 0.512]])
        monkeypatch.setattr(ServedRequest, "take", slowly)
        yield made


def first_event_s(client: httpx.Client, question: str, *, stream: bool = True) -> float:
    """Return how long the first part of an answer takes."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 2, "stream": stream}
    started_s = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        found_s = time.perf_counter() - started_s
        assert response.status_code == 200
        for _ in lines:
            pass
    return found_s


def seen_from_outside(engine: FusedKVEngine, padding: float | None) -> tuple[list[float], list[float]]:
    """Return how long answers take to begin when nobody has asked before, and when another user of the key has."""
    prompts = [rag_prompt(SHORT[:3], f"What about the ferries, number {number}?") for number in range(4)]
    without, with_ = [], []
    app = create_app(engine, ServerConfig(model_name="tiny", ttft_padding=padding))
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        first_event_s(client, "Hello")
        for prompt in prompts:
            engine.clear_prefix_cache()
            without.append(first_event_s(client, prompt))
            with_.append(first_event_s(client, prompt))
    return without, with_


def test_the_clock_does_not_tell_what_another_user_has_asked(slow: FusedKVEngine) -> None:
    without, with_ = seen_from_outside(slow, None)
    assert statistics.median(without) > statistics.median(with_) + 0.1
    without, with_ = seen_from_outside(slow, 2.0)
    assert statistics.median(without) == pytest.approx(statistics.median(with_), abs=0.03)
    tokens = len(slow.encode([{"role": "user", "content": rag_prompt(SHORT[:3], "What about the ferries, number 0?")}]))
    assert min(without + with_) >= 2.0 * tokens / 1000


def test_whole_answers_and_texts_are_padded_too(slow: FusedKVEngine) -> None:
    app = create_app(slow, ServerConfig(model_name="tiny", ttft_padding=2.0))
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        tokens = len(slow.encode([{"role": "user", "content": SHORT[0]}]))
        assert first_event_s(client, SHORT[0], stream=False) >= 0.002 * tokens
        started_s = time.perf_counter()
        body = {"model": "tiny", "prompt": ["Hi", SHORT[0]], "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert time.perf_counter() - started_s >= 0.1


def test_a_client_that_leaves_while_its_answer_is_held(slow: FusedKVEngine) -> None:
    app = create_app(slow, ServerConfig(model_name="tiny", ttft_padding=100.0))
    with running(app) as url:
        body = {"model": "tiny", "messages": [{"role": "user", "content": SHORT[0]}], "max_tokens": 1800}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=0.5)
        wait_until(lambda: not slow.is_busy)


def test_what_prefills_take_is_measured_before_the_first_request(tmp_path: Path) -> None:
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        with running(create_app(engine, ServerConfig())):
            assert engine.corpus.cost.seconds is None
        with running(create_app(engine, ServerConfig(ttft_padding=1.5))):
            assert engine.corpus.cost.seconds is not None
    with pytest.raises(ConfigError, match="ttft_padding"):
        ServerConfig(ttft_padding=0.5)
