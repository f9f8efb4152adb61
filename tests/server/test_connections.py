"""Clients that do not say what they want, or do not read what they are told: others are served, memory is bounded."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
# Answers with much text for few tokens, so that one of them is more than the system keeps for a client.
LONG = {**HELLO, "max_tokens": 1500, "temperature": 1, "logprobs": True, "top_logprobs": 20, "stream": True}
QUICK = {
    "model_name": "tiny",
    "head_timeout_s": 0.5,
    "body_timeout_s": 0.5,
    "write_timeout_s": 0.5,
    "keep_alive_s": 1,
    "max_unread_bytes": 4096,
}


@contextmanager
def served(engine: FusedKVEngine, **options: Any) -> Iterator[str]:
    config = ServerConfig(**{**QUICK, **options})
    with running(create_app(engine, config), config) as url:
        yield url


@pytest.fixture(scope="module")
def quick(engine: FusedKVEngine) -> Iterator[str]:
    with served(engine) as url:
        yield url


def connected(url: str, received_bytes: int | None = None) -> socket.socket:
    made = socket.socket()
    if received_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
    host, port = url.removeprefix("http://").split(":")
    made.connect((host, int(port)))
    made.settimeout(10)
    return made


def request_of(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def read_all(client: socket.socket, into: bytearray) -> None:
    while part := client.recv(65536):
        into += part


def is_closed(client: socket.socket, send: bytes = b"") -> bool:
    """Send one byte more, and say whether the server has ended the connection."""
    client.settimeout(0.05)
    try:
        if send:
            client.sendall(send)
        return client.recv(65536) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat"], ids=["silent", "byte_by_byte"])
def test_a_head_that_never_comes(quick: str, begun: bytes) -> None:
    with connected(quick) as client:
        if begun:
            client.sendall(begun)
        wait_until(lambda: is_closed(client, begun and b"x"), timeout_s=5)


def test_a_second_head_that_never_comes(quick: str) -> None:
    """The time for it begins with its first byte, and further bytes do not make it longer."""
    with connected(quick) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /hea")
        assert b"200 OK" in client.recv(4096)
        wait_until(lambda: is_closed(client, b"x"), timeout_s=5)


def test_a_body_byte_by_byte(quick: str) -> None:
    """No pause is too long, but all of it takes too long."""
    with connected(quick) as client:
        client.sendall(request_of(HELLO)[:-40])
        answer = b""
        while not answer:
            client.sendall(b" ")
            client.settimeout(0.2)
            with suppress(TimeoutError):
                answer = client.recv(4096)
        assert b"408" in answer.split(b"\r\n")[0]
        wait_until(lambda: is_closed(client, b" "), timeout_s=5)


def test_a_large_head(engine: FusedKVEngine) -> None:
    with served(engine, max_head_bytes=4096) as url, connected(url) as client:
        assert httpx.get(f"{url}/health", headers={"x": "y" * 3000}).status_code == 200
        client.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * 3000)
        client.sendall(b"y" * 3000)
        assert b"400" in client.recv(4096).split(b"\r\n")[0]


def test_a_client_that_does_not_read_is_given_up(quick: str, engine: FusedKVEngine) -> None:
    with connected(quick, received_bytes=4096) as client:
        client.sendall(request_of(LONG))
        wait_until(lambda: engine.is_busy)
        assert httpx.post(f"{quick}/v1/chat/completions", json=HELLO, timeout=60).status_code == 200
        wait_until(lambda: not engine.is_busy, timeout_s=10)
        received = bytearray()
        with pytest.raises(ConnectionResetError):
            read_all(client, received)
        assert b"[DONE]" not in received


def test_when_there_are_too_many_the_longest_silent_one_makes_room(engine: FusedKVEngine) -> None:
    with served(engine, max_connections=3, head_timeout_s=60) as url, ExitStack() as entered:
        silent = [entered.enter_context(connected(url)) for _ in range(3)]
        assert httpx.get(f"{url}/health").status_code == 200
        wait_until(lambda: is_closed(silent[0]))
        assert not is_closed(silent[1])
        assert not is_closed(silent[2])


def test_who_is_answered_makes_no_room(engine: FusedKVEngine) -> None:
    with served(engine, max_connections=1, write_timeout_s=60) as url:
        body = {**HELLO, "max_tokens": 1500, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as running_answer:
            lines = running_answer.iter_lines()
            next(lines)
            refused = httpx.get(f"{url}/health")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert int(refused.headers["Retry-After"]) > 0
            assert next(line for line in lines if line).startswith("data: {")
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)


def test_all_bodies_together_are_bounded(engine: FusedKVEngine) -> None:
    with served(engine, max_bodies_bytes=20_000, body_timeout_s=30) as url, connected(url) as slow:
        slow.sendall(request_of({**HELLO, "user": "x" * 15_000})[:-1])
        large = {**HELLO, "user": "x" * 10_000}
        wait_until(lambda: httpx.post(f"{url}/v1/chat/completions", json=large, timeout=60).status_code == 503)
        assert httpx.post(f"{url}/v1/chat/completions", json=HELLO, timeout=60).status_code == 200
        slow.sendall(b"}")
        assert b"200 OK" in slow.recv(4096)
        # What it had is free again.
        wait_until(lambda: httpx.post(f"{url}/v1/chat/completions", json=large, timeout=60).status_code == 200)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.heavy
def test_a_thousand_of_them_keep_nobody_out(engine: FusedKVEngine) -> None:
    """Silent, heads and bodies that never end, answers never read, 250 of each; and others beside them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    kinds = [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost", request_of(HELLO)[:-20], request_of(LONG)]
    options = {"head_timeout_s": 10, "body_timeout_s": 10, "write_timeout_s": 10, "max_unread_bytes": 128 * 1024}
    with served(engine, max_connections=500, **options) as url, ExitStack() as entered:
        assert httpx.post(f"{url}/v1/chat/completions", json=HELLO, timeout=60).status_code == 200
        before, answers = _resident_bytes(), []
        for number in range(1000):
            client = entered.enter_context(connected(url, received_bytes=4096))
            client.sendall(kinds[number % 4])
            if number % 50 == 49:
                answers.append(httpx.get(f"{url}/health", timeout=10).status_code)
        # Who asks gets an answer, or hears that the queue is full.
        ask = partial(httpx.post, f"{url}/v1/chat/completions", json=HELLO, timeout=60)
        answers += [ask().status_code for _ in range(20)]
        assert set(answers[:20]) == {200}
        assert set(answers) <= {200, 429}
        assert _resident_bytes() - before < 200 * 2**20
        wait_until(lambda: not engine.is_busy, timeout_s=120)
        assert httpx.post(f"{url}/v1/chat/completions", json=HELLO, timeout=60).status_code == 200
