"""Requests that are cancelled, closed early or broken by a callback leave nothing behind, and the next one is right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any

import pytest
from corpus import SHORT
from held_memory import caches_in_use
from langchain_core.callbacks import BaseCallbackHandler
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from langchain_fused_kv import ChatFusedKV
from langchain_fused_kv import FusedKVLLM as TextModel
from llama_index_fused_kv import FusedKVLLM as LlamaIndexLLM

PROMPT = "\n\n".join([*SHORT[:3], "What about the ferries?"])
LONG = 1500  # tokens: an answer that nobody ended would take a second and more


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    folder = tmp_path_factory.mktemp("abandoned")
    options: dict[str, Any] = {"preprocessing": "none", "recompute_ratio": 0.15}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        yield engine


def left_over(engine: FusedKVEngine) -> list[str]:
    """What abandoned requests keep of an engine; waits until running steps have ended."""
    left: list[str] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = ["a cache"] * len(caches_in_use(engine))
        left += ["the model's lock"] * engine.model_lock.locked()
        left += ["the pool's buffer"] * (engine.requests.context.pool.kept_nbytes() == 0)
        if not left:
            return []
        time.sleep(0.02)
    return left


async def _langchain(llm: Any, abandon_s: float, number: int) -> None:
    """One of 20 users: every third waits for an answer, another streams, the last leaves a stream after two pieces."""
    if number % 3 == 0:
        await asyncio.wait_for(llm.ainvoke(PROMPT, max_tokens=LONG), abandon_s)
    elif number % 3 == 1:
        with suppress(StopAsyncIteration):
            stream = llm.astream(PROMPT, max_tokens=LONG)
            async with asyncio.timeout(abandon_s):
                while True:
                    await anext(stream)
    else:
        async with aclosing(llm.astream(PROMPT, max_tokens=LONG)) as stream:
            await anext(stream)
            await anext(stream)


async def _llama_index(llm: LlamaIndexLLM, abandon_s: float, number: int) -> None:
    if number % 2:
        await asyncio.wait_for(llm.acomplete(PROMPT, max_tokens=LONG), abandon_s)
    else:
        stream = await llm.astream_complete(PROMPT, max_tokens=LONG)
        async with asyncio.timeout(abandon_s):
            async for _ in stream:
                pass


@pytest.mark.parametrize("kind", [TextModel, ChatFusedKV, LlamaIndexLLM])
def test_twenty_users_who_leave(quick: FusedKVEngine, kind: Any) -> None:
    llm = kind.from_engine(quick, max_tokens=6)
    ask: Callable[..., Any] = _llama_index if kind is LlamaIndexLLM else _langchain
    alone = quick.generate(PROMPT, max_tokens=6).token_ids
    tokens: list[int] = []
    finish = llm._runtime.finish
    llm._runtime.__dict__["finish"] = lambda *args: tokens.append(args[1].completion_tokens) or finish(*args)

    async def main() -> list[Any]:
        asked = (ask(llm, 0.05 + 0.02 * number, number) for number in range(20))
        return await asyncio.gather(*asked, return_exceptions=True)

    results = asyncio.run(main())
    assert {type(result) for result in results} <= {TimeoutError, type(None)}
    assert any(isinstance(result, TimeoutError) for result in results)
    # Not one of the abandoned answers was written to its end.
    assert tokens == []
    assert left_over(quick) == []
    assert quick.generate(PROMPT, max_tokens=6).token_ids == alone


class _Broken(BaseCallbackHandler):
    raise_error = True

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        raise RuntimeError("a broken callback")


@pytest.mark.parametrize("kind", [TextModel, ChatFusedKV])
def test_a_callback_that_raises(quick: FusedKVEngine, kind: Any) -> None:
    llm = kind.from_engine(quick, max_tokens=LONG)
    before = quick.generate(PROMPT, max_tokens=6).token_ids

    async def consume() -> None:
        async for _ in llm.astream(PROMPT, config={"callbacks": [_Broken()]}):
            pass

    with pytest.raises(RuntimeError, match="a broken callback"):
        list(llm.stream(PROMPT, config={"callbacks": [_Broken()]}))
    assert left_over(quick) == []
    with pytest.raises(RuntimeError, match="a broken callback"):
        asyncio.run(consume())
    assert left_over(quick) == []
    assert quick.generate(PROMPT, max_tokens=6).token_ids == before


def test_a_stream_that_nobody_reads(quick: FusedKVEngine) -> None:
    stream = quick.stream(PROMPT, max_tokens=LONG)
    assert caches_in_use(quick)
    stream.close()
    assert left_over(quick) == []


def test_a_stream_that_is_dropped(quick: FusedKVEngine) -> None:
    stream = quick.stream(PROMPT, max_tokens=LONG)
    assert caches_in_use(quick)
    del stream
    assert left_over(quick) == []


def test_a_constraint_that_raises(quick: FusedKVEngine) -> None:
    def broken(ids: Any, logits: Any) -> Any:
        raise ValueError("a broken constraint")

    with pytest.raises(ValueError, match="a broken constraint") as caught:
        list(quick.stream(PROMPT, max_tokens=6, constraint=broken))
    assert left_over(quick) == []
    assert caught.value.__traceback__ is not None  # which would keep what was not released
