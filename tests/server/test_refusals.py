"""What cannot be answered is refused with OpenAI's error object, and nothing is ignored."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from corpus import SHORT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server.requests import ChatRequest, CompletionRequest

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
UNSUPPORTED: list[tuple[str, Any]] = [
    ("frequency_penalty", 0.5), ("presence_penalty", -1), ("logit_bias", {"5": 1}), ("store", True),
    ("modalities", ["audio"]), ("service_tier", "flex"), ("audio", {}), ("prediction", {}), ("functions", []),
    ("function_call", "auto"), ("web_search_options", {}), ("reasoning_effort", "low"), ("top_k", 5),
    ("response_format", {"type": "grammar"}), ("response_format", {"type": "json_schema"}), ("n", 17), ("n", 0),
    ("tool_choice", "required"), ("top_logprobs", 2), ("temperature", 3), ("top_p", 0), ("max_tokens", 0),
    ("stop", ["a"] * 17), ("seed", "x"), ("seed", -1), ("stream", "maybe"), ("messages", []), ("messages", "Hello"),
    ("messages", [{"role": "king", "content": "x"}]), ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("tools", [{"type": "web_search"}]), ("fused_kv", {"ratio": 1}), ("fused_kv", {"selector": "nobody"}),
    ("fused_kv", {"recompute_ratio": 2}), ("stream_options", {"include_usage": True}),
]  # fmt: skip


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_is_not_supported_is_refused(client: httpx.Client, name: str, value: Any) -> None:
    error = refused(client.post("/v1/chat/completions", json={**HELLO, name: value}))
    assert error["type"] == "invalid_request_error"
    assert name in (error["param"] or error["message"]) or "selector" in error["message"]


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("best_of", 2), ("suffix", "x"), ("prompt", []),
                                             ("prompt", [1, 2]), ("logprobs", 6), ("messages", [])])  # fmt: skip
def test_completions_too(client: httpx.Client, name: str, value: Any) -> None:
    body = {"model": "tiny", "prompt": "Hello", name: value}
    assert name in refused(client.post("/v1/completions", json=body))["param"]


def test_neutral_values_are_accepted(client: httpx.Client) -> None:
    nothing = dict.fromkeys(
        ("n", "seed", "stop", "stream", "temperature", "top_p", "tools", "stream_options", "fused_kv")
    )
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "store": False, "user": "u",
               "modalities": ["text"], "service_tier": "auto", "response_format": {"type": "text"},
               "parallel_tool_calls": True, **nothing}  # fmt: skip
    assert client.post("/v1/chat/completions", json={**HELLO, **neutral}).status_code == 200


def test_another_model(client: httpx.Client) -> None:
    error = refused(client.post("/v1/chat/completions", json={**HELLO, "model": "gpt-5"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    refused(client.get("/v1/models/gpt-5"), 404)
    refused(client.get("/nowhere"), 404)
    refused(client.get("/v1/chat/completions"), 405)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(client: httpx.Client, engine: FusedKVEngine, stream: bool) -> None:
    messages = [{"role": "user", "content": "word " * engine.context_length}]
    error = refused(client.post("/v1/chat/completions", json={**HELLO, "messages": messages, "stream": stream}))
    assert error["code"] == "context_length_exceeded"
    assert str(engine.context_length) in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 50_000, b'{"model": ' * 20_000,
                                  b'{"model": "tiny", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"])  # fmt: skip
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_bodies_that_are_no_requests(client: httpx.Client, body: bytes, kind: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        refused(client.post(path, content=body, headers={"content-type": kind}))


@pytest.mark.parametrize("depth", [600, 900])
def test_what_is_nested_too_deep(client: httpx.Client, depth: int) -> None:
    deep = '{"a": ' * depth + "1" + "}" * depth
    ask = '{"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}], '
    form = f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {deep}}}}}}}'
    refused(client.post("/v1/chat/completions", content=ask + form, headers={"content-type": "application/json"}))


def test_arguments_that_are_nested_too_deep(client: httpx.Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": ' + "[" * 100_000}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, *HELLO["messages"]]
    error = refused(client.post("/v1/chat/completions", json={**HELLO, "messages": messages}))
    assert error["param"] == "messages.0.tool_calls"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["/v1/chat/completions", "/v1/completions"]), st.data())
def test_no_body_breaks_the_server(client: httpx.Client, path: str, data: st.DataObject) -> None:
    kind = ChatRequest if path.startswith("/v1/chat") else CompletionRequest
    body = {"model": "tiny", "max_tokens": 1, "messages" if kind is ChatRequest else "prompt": "Hello"}
    if kind is ChatRequest:
        body = dict(HELLO)
    names = st.sampled_from(sorted(set(kind.model_fields) - {"max_tokens"}))
    body |= data.draw(st.dictionaries(names, _VALUES, min_size=1, max_size=3))
    response = client.post(path, json=body)
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        refused(response, response.status_code)


def test_a_full_queue(client: httpx.Client, engine: FusedKVEngine) -> None:
    """Four run and two wait; more are told to come back, and the others are answered."""
    body = {**HELLO, "messages": [{"role": "user", "content": SHORT[0]}], "max_tokens": 400, "temperature": 0}
    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda _: client.post("/v1/chat/completions", json=body), range(12)))
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 429}
    for response in responses:
        if response.status_code == 429:
            assert refused(response, 429)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
    wait_until(lambda: not engine.is_busy)


def test_errors_do_not_tell_what_is_inside(
    client: httpx.Client, engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("a secret path")

    monkeypatch.setattr(engine, "submit", broken)
    error = refused(client.post("/v1/chat/completions", json=HELLO), 500)
    assert "secret" not in str(error)
    assert error["type"] == "server_error"
