"""Clients are told why chunks were not reused, and nothing of what others have."""

from __future__ import annotations

from typing import Any

import httpx
from corpus import SHORT, rag_prompt
from server.running import running

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app


def ask(client: httpx.Client, chunks: list[str], expected: list[str], **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": rag_prompt(chunks)}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 2, "fused_kv": {"expected": expected}, **more}
    return client.post("/v1/chat/completions", json=body)


def test_a_text_is_checked(client: httpx.Client) -> None:
    stored = client.post("/v1/documents/check", json={"text": SHORT[0]}).json()
    assert (stored["outcome"], stored["remedy"]) == ("reusable", "")
    other = client.post("/v1/documents/check", json={"text": SHORT[0].replace(" ", "\n", 1)}).json()
    assert (other["outcome"], other["chunk_id"]) == ("respaced", stored["chunk_id"])
    assert client.post("/v1/documents/check", json={"text": SHORT[9]}).json()["outcome"] == "not_ingested"
    for wrong in ({}, {"text": ""}, {"text": 3}, {"text": SHORT[0], "operator": True}):
        assert client.post("/v1/documents/check", json=wrong).status_code == 400


def test_an_answer_has_verdicts(client: httpx.Client) -> None:
    chunks = [SHORT[0], SHORT[1].replace(" ", "\n", 2), SHORT[9]]
    report = ask(client, chunks, [SHORT[0], SHORT[1], SHORT[9], SHORT[2]]).json()["fused_kv"]
    outcomes = [verdict["outcome"] for verdict in report["verdicts"]]
    assert outcomes == ["reused", "respaced", "not_ingested", "not_in_prompt"]
    assert report["verdicts"][1]["diff"].startswith("--- ingested")


def test_too_many_are_refused(client: httpx.Client) -> None:
    assert ask(client, SHORT[:1], ["a"] * 65).status_code == 400
    assert ask(client, SHORT[:1], ["a" * 100_001]).status_code == 400


def test_tenants_learn_nothing_of_each_other(engine: FusedKVEngine) -> None:
    keys = {"one": "the-key-of-tenant-one", "two": "the-key-of-tenant-two"}
    with running(create_app(engine, ServerConfig(model_name="tiny", api_keys=keys))) as url:
        for number in range(2):
            headers = {"Authorization": f"Bearer {list(keys.values())[number]}"}
            with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
                # The server's own chunks are another tenant's for both.
                known = client.post("/v1/documents/check", json={"text": SHORT[0]}).json()
                unknown = client.post("/v1/documents/check", json={"text": SHORT[9]}).json()
                assert {**known, "text": ""} == {**unknown, "text": ""}
                assert known["outcome"] == "not_ingested"
                (verdict,) = ask(client, SHORT[:1], SHORT[:1]).json()["fused_kv"]["verdicts"]
                assert {**verdict, "text": ""} == {**unknown, "text": ""}
