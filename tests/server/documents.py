"""What tests of documents do as clients."""

from __future__ import annotations

from typing import Any

import httpx
from corpus import SHORT
from waiting import wait_until

ENDED = ("done", "failed", "cancelled", "interrupted")


def text_of(*numbers: int) -> str:
    """Return a text whose chunks of 300 characters are passages of the handbook."""
    return "\n\n".join(SHORT[number] for number in numbers)


def upload(client: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/documents", json={"text": text, **fields})
    assert response.status_code == 202, response.text
    return response.json()


def ended(client: httpx.Client, job: str) -> dict[str, Any]:
    """Wait for the end of a job."""
    found: dict[str, Any] = {}

    def over() -> bool:
        found.update(client.get(f"/v1/jobs/{job}").json())
        return found["state"] in ENDED

    wait_until(over, timeout_s=60)
    return found


def ingested(client: httpx.Client, text: str, **fields: Any) -> str:
    """Upload a text and return its document's id when it can be retrieved."""
    made = upload(client, text, **fields)
    assert ended(client, made["job_id"])["state"] == "done"
    return made["id"]


def retrieve(client: httpx.Client, question: str, k: int = 2, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": question}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0}
    return client.post("/v1/chat/completions", json={**body, "fused_kv": {"retrieve": {"k": k}}, **fields})
