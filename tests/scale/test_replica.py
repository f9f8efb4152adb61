"""A replica without Ray: it answers as the server does, tells of its chunks, and ends what its callers leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import EngineClosedError
from fused_kv_llm.prompt import content_hash
from fused_kv_llm.scale.chunk_names import chunk_name
from fused_kv_llm.scale.forwarding import Call, answered_by
from fused_kv_llm.scale.placement import Part, RoutingKey
from fused_kv_llm.scale.replica import EngineReplica
from fused_kv_llm.scale.routing_stats import ReplicaStats, held_of, load_of
from fused_kv_llm.server import ServerConfig, create_app


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("replica")
    tiny_model().save_pretrained(folder / "model")
    smollm2_tokenizer().save_pretrained(folder / "model")
    made = {"model": str(folder / "model"), "kv_dir": str(folder / "kv"), "preprocessing": "none", "dtype": "float32",
            "store_misses": False, "prefix_cache_bytes": 0}  # fmt: skip
    with FusedKVEngine(**made) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
    return made


@pytest.fixture
def replica(options: dict[str, Any]) -> Iterator[EngineReplica]:
    made = EngineReplica(options, {"model_name": "tiny"})
    try:
        yield made
    finally:
        asyncio.run(made.close())


def call(body: dict[str, Any], path: str = "/v1/chat/completions", method: str = "POST") -> Call:
    headers = [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json")]
    scope = {"method": method, "path": path, "query_string": b"", "headers": headers, "scheme": "http",
             "http_version": "1.1", "client": ("127.0.0.1", 5)}  # fmt: skip
    return Call.of(scope, json.dumps(body).encode())


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "max_tokens": 6,
        "temperature": 0,
        **more,
        "messages": [{"role": "user", "content": prompt}],
    }


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


async def answer(replica: EngineReplica, body: dict[str, Any], key: RoutingKey | None = None) -> tuple[int, str]:
    messages = [one async for one in replica.answer(call(body), key or RoutingKey(0))]
    return messages[0]["status"], b"".join(one.get("body", b"") for one in messages[1:]).decode()


def test_it_answers_as_the_server_does(replica: EngineReplica) -> None:
    body = asked(rag_prompt(SHORT[:2]))

    async def both() -> tuple[Any, Any]:
        transport = httpx.ASGITransport(create_app(replica.engine, ServerConfig(model_name="tiny")))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            want = (await client.post("/v1/chat/completions", json=body)).json()
        return want, json.loads((await answer(replica, body))[1])

    want, got = run(both)
    assert got["choices"] == want["choices"]
    assert got["fused_kv"]["chunks_found"] == 2


def test_a_refusal_is_passed_on(replica: EngineReplica) -> None:
    status, text = run(lambda: answer(replica, {"model": "tiny"}))
    assert (status, json.loads(text)["error"]["param"]) == (400, "messages")


def test_it_publishes_what_its_memory_holds_and_whom_it_answered(replica: EngineReplica) -> None:
    key = RoutingKey(10, (), (Part(77, 10), Part(76, 5)))

    async def publish() -> tuple[Any, Any]:
        before = await replica.record_routing_stats()
        await answer(replica, asked(rag_prompt(SHORT[1:3])), key)
        return before, await replica.record_routing_stats()

    before, after = run(publish)
    assert held_of(before).chunks == frozenset()
    assert held_of(after).chunks == {chunk_name(content_hash(text).full, "") for text in SHORT[1:3]}
    assert held_of(after).prefixes == {77}
    assert load_of(after) == 0


def test_what_is_published_is_bounded(replica: EngineReplica) -> None:
    stats = ReplicaStats(most_chunks=1, most_conversations=2)
    for number in range(5):
        stats.answered(RoutingKey(1, (), (Part(number, 1),)))
    run(lambda: answer(replica, asked(rag_prompt(SHORT[:3]))))
    published = stats.published([("", replica.engine)], 2, 3)
    assert len(held_of(published).chunks) == 1
    assert published["chunks_left_out"] == 2
    assert held_of(published).prefixes == {3, 4}
    assert load_of(published) == 5


def test_stats_of_another_version_say_nothing() -> None:
    assert held_of({"version": 99, "chunks": b"x"}) == held_of({})


def test_it_tells_of_stored_chunks_once(replica: EngineReplica) -> None:
    async def twice() -> tuple[Any, Any]:
        name, after, hashes = await replica.stored({})
        return hashes, await replica.stored({name: after})

    (_, full, length), (_, _, again) = run(twice)
    assert set(full.tolist()) == {content_hash(text).full for text in SHORT[:4]}
    assert sorted(length.tolist()) == sorted(len(text) for text in SHORT[:4])
    assert len(np.concatenate(again)) == 0


def test_a_caller_that_leaves_ends_the_request(replica: EngineReplica) -> None:
    async def leave() -> str:
        messages = replica.answer(call(asked(rag_prompt(SHORT[:2]), stream=True, max_tokens=500)), RoutingKey(0))
        while (await anext(messages))["type"] != "http.response.body":
            pass
        await messages.aclose()
        for _ in range(200):
            if replica.engine.requests.open == (0, 0):
                break
            await asyncio.sleep(0.02)
        assert replica.engine.requests.open == (0, 0)
        told = [one async for one in replica.answer(call({}, "/metrics", "GET"), RoutingKey(0))]
        return str(told[1]["body"])

    # An answer that was written to its end is counted.
    assert "vllm:request_success_total{" not in run(leave)


def test_an_application_that_fails_is_heard_of() -> None:
    async def failing(*_: Any) -> None:
        raise ValueError("no")

    async def ask() -> None:
        async for _ in answered_by(failing, call({})):
            pass

    with pytest.raises(ValueError, match="no"):
        run(ask)


def test_a_closed_engine_is_not_healthy(options: dict[str, Any], tmp_path: Path) -> None:
    replica = EngineReplica({**options, "kv_dir": str(tmp_path)}, {})
    replica.check_health()
    asyncio.run(replica.close())
    with pytest.raises(EngineClosedError):
        replica.check_health()
