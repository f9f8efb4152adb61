"""Keys, hosts, origins and bodies: who gets in."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.server import ServerConfig, create_app

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
KEY, OTHER = "a-key-of-sixteen-characters", "another-key-of-sixteen-characters"


@pytest.fixture(scope="module")
def guarded(engine: FusedKVEngine) -> Iterator[str]:
    config = ServerConfig(
        model_name="tiny", api_keys={"one": KEY, "two": OTHER}, max_body_bytes=4096, body_timeout_s=0.5,
        allowed_origins=("https://app.example",), allowed_hosts=("rag.example",),
    )  # fmt: skip
    with running(create_app(engine, config)) as url:
        yield url


def ask(url: str, **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=HELLO, headers=headers, timeout=60)


@pytest.mark.parametrize("key", [KEY, "wrong"])
def test_a_request_has_a_name_that_leads_to_its_line(guarded: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    name = "fused_kv_llm.server.request_log"
    with caplog.at_level("INFO", name):
        mine = ask(guarded, authorization=f"Bearer {key}", **{"x-request-id": "mine-1.2:3"})
        forged = ask(guarded, authorization=f"Bearer {key}", **{"x-request-id": "a b"})
        odd = httpx.post(f"{guarded}/v1/%0aforged%20line?key={KEY}", headers={"authorization": f"Bearer {KEY}"})
        # A line is written after its answer has been sent.
        wait_until(lambda: len([record for record in caplog.records if record.name == name]) == 3)
    records = [record for record in caplog.records if record.name == name]
    assert mine.headers["x-request-id"] == "mine-1.2:3"
    assert re.fullmatch("[0-9a-f]{32}", forged.headers["x-request-id"])
    lines = [record.getMessage() for record in records]
    assert [line.rpartition(" ")[2] for line in lines] == [one.headers["x-request-id"] for one in (mine, forged, odd)]
    assert not any("\n" in line or KEY in line for line in lines)
    assert [vars(record)["line"]["tenant"] for record in records] == ["one" if key == KEY else ""] * 2 + ["one"]


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", KEY])
def test_a_key_is_needed(guarded: str, given: str) -> None:
    response = ask(guarded, authorization=given)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


def test_whoever_has_one_gets_in(guarded: str) -> None:
    for key in (KEY, OTHER):
        assert ask(guarded, authorization=f"Bearer {key}").status_code == 200
    for path in ("health", "ready", "version"):
        assert httpx.get(f"{guarded}/{path}").status_code == 200
    for path in ("metrics", "v1/models", "openapi.json"):
        assert httpx.get(f"{guarded}/{path}").status_code == 401


def test_hosts(guarded: str) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    assert ask(guarded, host="rebound.example", **key).status_code == 403
    assert ask(guarded, host="rebound.example:80", **key).status_code == 403
    for host in ("localhost:9", "127.0.0.1", "[::1]:8000", "RAG.example:443"):
        assert ask(guarded, host=host, **key).status_code == 200


def test_origins(guarded: str) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        assert ask(guarded, origin=origin, **key).status_code == 403
    for origin in ("https://app.example", guarded):
        assert ask(guarded, origin=origin, **key).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies(guarded: str, chunked: bool) -> None:
    body = b'{"model": "' + b"x" * 8192 + b'"}'
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    content = iter([body[:100], body[100:]]) if chunked else body
    response = httpx.post(f"{guarded}/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 413
    assert "4096" in response.json()["error"]["message"]


def test_bodies_that_never_end(guarded: str) -> None:
    """Many of them do not keep others out."""
    host, port = guarded.removeprefix("http://").split(":")
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\n"
            "Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{").encode()  # fmt: skip
    slow = [socket.create_connection((host, int(port))) for _ in range(50)]
    try:
        for one in slow:
            one.sendall(head)
        assert ask(guarded, authorization=f"Bearer {KEY}").status_code == 200
        for one in slow:
            one.settimeout(20)
            assert b"408" in one.recv(4096).split(b"\r\n")[0]
    finally:
        for one in slow:
            one.close()


def test_beyond_this_machine_a_key_is_required() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "rag.example"):
        with pytest.raises(ConfigError, match="keys are needed"):
            ServerConfig(host=host)
        assert not ServerConfig(host=host, api_keys={"one": KEY}).is_local
    for host in ("127.0.0.1", "::1", "localhost"):
        assert ServerConfig(host=host).is_local
    with pytest.raises(ConfigError, match="shorter than 16"):
        ServerConfig(api_keys={"one": "short"})
    with pytest.raises(ConfigError, match="port"):
        ServerConfig(port=70_000)
    assert KEY not in repr(ServerConfig(api_keys={"one": KEY}))


def test_threads_end_with_the_server(engine: FusedKVEngine) -> None:
    before = threading.active_count()
    with running(create_app(engine)) as url:
        httpx.get(f"{url}/health")
    assert threading.active_count() <= before + 1
