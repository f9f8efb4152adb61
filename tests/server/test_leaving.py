"""Clients that leave: their requests end, and their memory is given back."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
from corpus import SHORT, rag_prompt
from held_memory import caches_in_use
from waiting import wait_until

from fused_kv_llm import FusedKVEngine

BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": rag_prompt(SHORT[:3], "What about the ferries?")}],
    "max_tokens": 1800,
    "temperature": 0,
}


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_whose_client_leaves(url: str, engine: FusedKVEngine, n: int) -> None:
    for _ in range(3):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True, "n": n}) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
        wait_until(lambda: not engine.is_busy, timeout_s=5)
        assert caches_in_use(engine) == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_anything_came(url: str, engine: FusedKVEngine, stream: bool) -> None:
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: engine.is_busy)
    wait_until(lambda: not engine.is_busy, timeout_s=5)
    assert caches_in_use(engine) == []
    assert httpx.post(f"{url}/v1/chat/completions", json={**BODY, "max_tokens": 2}, timeout=60).status_code == 200
