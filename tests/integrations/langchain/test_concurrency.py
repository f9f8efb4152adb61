"""One LLM used from several threads and tasks at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from event_loop import counted_ticks
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import PromptTooLongError
from fused_kv_llm.serving.scheduler import Scheduler
from langchain_fused_kv import FusedKVLLM


def test_threads_get_the_answers_they_get_alone(llm: FusedKVLLM, prompts: list[str]) -> None:
    alone = [llm.invoke(prompt) for prompt in prompts]
    assert len(set(alone)) > 1
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(llm.invoke, prompts * 2))
    assert together == alone * 2


def test_streams_in_threads_get_the_answers_they_get_alone(llm: FusedKVLLM, prompts: list[str]) -> None:
    alone = [llm.invoke(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: "".join(llm.stream(prompt)), prompts))
    assert together == alone


def test_each_result_carries_its_own_report(llm: FusedKVLLM, prompts: list[str]) -> None:
    ratios = [0.0, 0.25, 0.5, 1.0]

    def used(prompt: str, ratio: float) -> tuple[float, int]:
        info = llm.generate([prompt], recompute_ratio=ratio).generations[0][0].generation_info
        assert info is not None
        return info["fused_kv"]["recompute_ratio"], info["fused_kv"]["chunks_found"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(used, prompts, ratios)) == [(ratio, 2) for ratio in ratios]


def test_batch_and_abatch(llm: FusedKVLLM, prompts: list[str]) -> None:
    alone = [llm.invoke(prompt) for prompt in prompts[:2]]
    assert llm.batch(prompts[:2]) == alone
    assert asyncio.run(llm.abatch(prompts[:2])) == alone


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests there were, step by step."""
    counts, step = list[int](), Scheduler.step

    def counted(self: Scheduler) -> None:
        counts.append(len(self.requests()))
        step(self)

    monkeypatch.setattr(Scheduler, "step", counted)
    return counts


def test_prompts_of_one_call_are_answered_at_once(llm: FusedKVLLM, prompts: list[str], at_once: list[int]) -> None:
    llm.batch(prompts)
    assert 1 < max(at_once) <= len(prompts)
    at_once.clear()
    asyncio.run(llm.abatch(prompts))
    assert 1 < max(at_once) <= len(prompts)


def test_more_prompts_than_may_wait_are_answered(tmp_path: Path, prompts: list[str], at_once: list[int]) -> None:
    with FusedKVEngine("smollm2-135m", kv_dir=tmp_path, max_num_seqs=2, max_queued=1) as engine:
        llm = FusedKVLLM.from_engine(engine, max_tokens=4)
        alone = [llm.invoke(prompt) for prompt in prompts[:2]]
        assert llm.batch(prompts[:2] * 4) == alone * 4
    assert 1 < max(at_once) <= 3


def test_a_prompt_that_cannot_be_answered_cancels_those_behind_it(llm: FusedKVLLM, prompts: list[str]) -> None:
    with pytest.raises(PromptTooLongError):
        llm.generate([prompts[0], "word " * 10_000, *prompts[1:]], max_tokens=200)
    requests = llm.engine.requests._loop.scheduler.requests
    wait_until(lambda: not requests())


def test_async_calls_do_not_block_the_loop(llm: FusedKVLLM, prompts: list[str]) -> None:
    async def main() -> tuple[list[str], str, int]:
        async with counted_ticks() as ticks:
            answers = await asyncio.gather(*(llm.ainvoke(prompt) for prompt in prompts))
            streamed = "".join([piece async for piece in llm.astream(prompts[0])])
        return list(answers), streamed, ticks.count

    answers, streamed, ticks = asyncio.run(main())
    assert answers == [llm.invoke(prompt) for prompt in prompts]
    assert streamed == answers[0]
    assert ticks > 5
