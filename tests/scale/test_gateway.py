"""The gateway: requests are forwarded whole, a lost replica costs only those whose answers had begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from server.running import events, running
from starlette.types import ASGIApp
from waiting import wait_until

from fused_kv_llm.errors import QueueFullError
from fused_kv_llm.scale.forwarding import Call
from fused_kv_llm.scale.gateway import gateway_app
from fused_kv_llm.scale.placement import RoutingKey
from fused_kv_llm.scale.replica import EngineReplica
from fused_kv_llm.scale.routing_keys import RoutingKeys
from fused_kv_llm.server import ServerConfig

SERVER: dict[str, Any] = {"model_name": "tiny"}


class LostError(Exception):
    """Stands for Ray's error of an actor that died."""


class Replicas:
    """One real replica, reached through connections of which each may be lost after so many messages."""

    def __init__(self, replica: EngineReplica) -> None:
        self.replica = replica
        self.lose_after: list[int | None] = []
        self.keys: list[RoutingKey] = []
        self.error: Exception = LostError("gone")
        self.finished, self.lose_at_end = 0, False

    def ask(self, call: Call, key: RoutingKey) -> _Answering:
        self.keys.append(key)
        return _Answering(self, call, key, self.lose_after.pop(0) if self.lose_after else None)


class _Answering:
    def __init__(self, replicas: Replicas, call: Call, key: RoutingKey, lose_after: int | None) -> None:
        self._replicas, self._call, self._key, self._lose_after = replicas, call, key, lose_after
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Mapping[str, Any]]:
        sent = 0
        async for message in self._replicas.replica.answer(self._call, self._key):
            if sent == self._lose_after:
                raise self._replicas.error
            sent += 1
            yield message
        if self._replicas.lose_at_end:
            raise self._replicas.error
        self._replicas.finished += 1


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineReplica]:
    folder = tmp_path_factory.mktemp("gateway")
    tiny_model().save_pretrained(folder / "model")
    smollm2_tokenizer().save_pretrained(folder / "model")
    options = {"model": str(folder / "model"), "kv_dir": str(folder / "kv"), "preprocessing": "none",
               "dtype": "float32", "store_misses": False, "prefix_cache_bytes": 0}  # fmt: skip
    made = EngineReplica(options, SERVER)
    made.engine.build_kv_cache(SHORT[:4], progress=False)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def replicas(replica: EngineReplica) -> Replicas:
    return Replicas(replica)


def asking(replicas: Replicas, config: ServerConfig | None = None, **more: Any) -> ASGIApp:
    return gateway_app(replicas.ask, RoutingKeys(), config or ServerConfig(**SERVER), (LostError,), **more)


def ask(app: ASGIApp, path: str = "/v1/chat/completions", method: str = "POST", **request: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": rag_prompt(SHORT[:2])}]
    return {"model": "tiny", "max_tokens": 6, "temperature": 0, "messages": messages, **more}


def text_of(response: httpx.Response) -> str:
    return str(response.json()["choices"][0]["message"]["content"])


def test_an_answer_comes_through_whole_and_streamed(replicas: Replicas) -> None:
    whole, streamed = ask(asking(replicas), json=body()), ask(asking(replicas), json=body(stream=True))
    parts = [one["choices"][0]["delta"].get("content", "") for one in events(streamed.text) if one["choices"]]
    assert "".join(parts) == text_of(whole)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert replicas.keys[0].size == len(rag_prompt(SHORT[:2]))


@pytest.mark.parametrize("lose_after", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_lost_before_the_first_part_costs_nobody_an_answer(
    replicas: Replicas, lose_after: int, stream: bool
) -> None:
    want = ask(asking(replicas), json=body())
    replicas.lose_after = [lose_after, lose_after]
    got = ask(asking(replicas), json=body(stream=stream))
    assert got.status_code == 200
    assert len(replicas.keys) == 4
    if not stream:
        assert text_of(got) == text_of(want)
    else:
        assert events(got.text)[-1]["choices"][0]["finish_reason"] == "length"


def test_an_answer_that_had_begun_ends_with_an_error(replicas: Replicas) -> None:
    replicas.lose_after = [3]
    response = ask(asking(replicas), json=body(stream=True))
    *begun, last = events(response.text)
    assert response.status_code == 200
    assert len(begun) == 2
    assert last["error"]["code"] == "replica_lost"
    assert "ask again" in last["error"]["message"]
    assert len(replicas.keys) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_complete_stays_as_it_was(replicas: Replicas, stream: bool) -> None:
    sent = list[Any]()
    replicas.lose_at_end = True
    app = asking(replicas)

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            sent.append(message)
            await send(message)

        await app(scope, receive, noted)

    got = ask(watched, json=body(stream=stream))
    assert [one.get("more_body", False) for one in sent[1:]].count(False) == 1
    assert got.status_code == 200
    assert "error" not in got.text
    assert len(replicas.keys) == 1


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "sent",
    [rb'{"model": "tiny", "messages": [{"role": "\ud800", "content": "hi"}]}',
     rb'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "fused_kv": {"tenant": "\ud800"}}',
     b"[" * 200_000, b'{"messages": ' + DEEP + b"]" * 100_000 + b"}",
     b'{"messages": [{"role": ' + b"[" * 900 + b"]" * 900 + b', "content": "hi"}]}'],
    ids=["role", "tenant", "array", "messages", "deep role"],
)  # fmt: skip
def test_bodies_that_make_no_sense_are_refused_by_a_replica(replicas: Replicas, sent: bytes) -> None:
    response = ask(asking(replicas), content=sent, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500, response.text
    assert len(replicas.keys) == 1


def test_half_a_surrogate_pair_in_a_message_has_a_key() -> None:
    keys = RoutingKeys()
    found = [
        keys.key_of({"messages": [{"role": role, "content": "hi \ud800"}]}, tenant).prefixes
        for role, tenant in (("user", ""), ("user", "\ud800"))
    ]
    assert found[0] != found[1]


def test_after_so_many_losses_it_gives_up(replicas: Replicas) -> None:
    replicas.lose_after = [0, 0]
    response = ask(asking(replicas, attempts=2), json=body())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
    assert response.headers["retry-after"] == "1"


def test_what_may_have_been_done_is_not_done_again(replicas: Replicas) -> None:
    replicas.lose_after = [0]
    response = ask(asking(replicas), path="/v1/compare")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
    assert "may have been carried out" in response.json()["error"]["message"]


def test_a_full_queue_is_said_as_the_server_says_it(replicas: Replicas) -> None:
    replicas.lose_after, replicas.error = [0], QueueFullError("Too many requests wait.")
    response = ask(asking(replicas), json=body())
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")


@pytest.mark.parametrize(
    "path", ["/v1/documents", "/v1/documents/x", "/v1/jobs/y", "/v1/requests/x", "/v1/requests/x/trace"]
)
def test_what_one_process_has_to_do_is_refused(replicas: Replicas, path: str) -> None:
    response = ask(asking(replicas), path=path, method="GET")
    assert (response.status_code, response.json()["error"]["code"]) == (501, "not_with_replicas")
    retrieving = ask(asking(replicas), json=body(fused_kv={"retrieve": {"k": 2}}))
    assert (retrieving.status_code, retrieving.json()["error"]["code"]) == (501, "not_with_replicas")
    assert replicas.keys == []


def test_requests_are_counted_before_a_replica_is_asked(replicas: Replicas) -> None:
    app = asking(replicas, ServerConfig(quotas={"default": {"requests_per_minute": 2}}, **SERVER))
    assert [ask(app, json=body()).status_code for _ in range(3)] == [200, 200, 429]
    assert ask(app, path="/v1/compare", json={}).status_code == 429
    assert ask(app, path="/v1/models", method="GET").status_code == 200
    assert len(replicas.keys) == 3


def test_keys_and_hosts_are_checked_before_a_replica_is_asked(replicas: Replicas) -> None:
    guarded = asking(replicas, ServerConfig(api_keys={"a": "a-key-of-sixteen-characters"}))
    assert ask(guarded, json=body()).status_code == 401
    assert ask(asking(replicas), json=body(), headers={"host": "evil.example"}).status_code == 403
    assert ask(asking(replicas, ServerConfig(max_body_bytes=1024)), content=b"x" * 2000).status_code == 413
    assert replicas.keys == []


def test_tenants_have_keys_of_their_own(replicas: Replicas) -> None:
    config = ServerConfig(api_keys={name: f"{name}-key-of-sixteen-characters" for name in "ab"}, **SERVER)
    for name in "ab":
        header = {"authorization": f"Bearer {name}-key-of-sixteen-characters"}
        ask(asking(replicas, config), json=body(), headers=header)
    ask(asking(replicas), json=body(fused_kv={"tenant": "c"}))
    assert len({key.prefixes[0].key for key in replicas.keys}) == 3


def test_a_client_that_leaves_ends_its_request(replicas: Replicas) -> None:
    with running(asking(replicas)) as url:  # type: ignore[arg-type]
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body(stream=True, max_tokens=900)) as response:
            next(response.iter_lines())
        wait_until(lambda: replicas.replica.engine.requests.open == (0, 0))
    assert replicas.finished == 0


def test_what_runs_beside_ends_with_the_application(replicas: Replicas) -> None:
    seen: list[str] = []

    async def beside() -> None:
        seen.append("begun")
        try:
            await asyncio.sleep(600)
        finally:
            seen.append("ended")

    with running(asking(replicas, beside=beside)):  # type: ignore[arg-type]
        wait_until(lambda: seen == ["begun"])
    assert seen == ["begun", "ended"]
