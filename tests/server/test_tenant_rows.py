"""The rows of /v1/operations: everybody's without keys, one's own with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model
from server.documents import ingested, text_of
from server.running import running

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app
from fused_kv_llm.server.activity import Activity, Ended

KEYS = {"one": "the-key-of-tenant-one", "two": "the-key-of-tenant-two"}
QUOTA = {"requests_per_minute": 100, "tokens_per_minute": None, "stored_bytes": 10**9}


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    options: dict[str, Any] = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as made:
        yield made


def ask(client: httpx.Client, **fused_kv: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": SHORT[5]}], "max_tokens": 2, "fused_kv": fused_kv}
    client.post("/v1/chat/completions", json=body).raise_for_status()


def rows(client: httpx.Client) -> dict[tuple[str, str | None], dict[str, Any]]:
    found = client.get("/v1/operations").raise_for_status().json()["tenants"]
    return {(row["tenant"], row["name"]): row for row in found}


def test_without_keys_everybody_has_a_row(own_engine: FusedKVEngine) -> None:
    config = ServerConfig(model_name="tiny", quotas={"default": {"stored_bytes": 10**9}})
    with running(create_app(own_engine, config)) as url, httpx.Client(base_url=url, timeout=60) as client:
        (only,) = rows(client).values()
        assert (only["requests"], only["stored_bytes"], only["quota"]["stored_bytes"]) == (None, 0, 10**9)
        ingested(client, text_of(0, 1))
        for _ in range(2):
            ask(client, tenant="customer")
        ask(client)
        found = rows(client)
        assert list(found) == [("default", "customer"), ("default", None)]
        assert found["default", "customer"]["requests"]["ok"] == 2
        assert found["default", "customer"]["stored_bytes"] == 0
        assert found["default", "customer"]["quota"] is None
        assert found["default", None]["requests"]["ok"] == 1
        assert found["default", None]["tokens"]["completion"] == 2
        assert found["default", None]["stored_bytes"] > 0


def test_a_key_sees_its_own_rows(own_engine: FusedKVEngine) -> None:
    config = ServerConfig(model_name="tiny", api_keys=KEYS, quotas={"one": QUOTA})
    with running(create_app(own_engine, config)) as url:
        one, two = (
            httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {key}"}) for key in KEYS.values()
        )
        with one, two:
            ingested(one, text_of(0, 1))
            ingested(two, text_of(0, 1, 2))
            ask(two, tenant="customer")
            assert list(rows(one)) == [("one", None)]
            assert rows(one)["one", None]["quota"] == QUOTA
            assert set(rows(two)) == {("two", None), ("two", "customer")}
            small, large = rows(one)["one", None]["stored_bytes"], rows(two)["two", None]["stored_bytes"]
            assert 0 < small < large
    # What was stored with keys is shown to an operator without.
    with running(create_app(own_engine, ServerConfig(model_name="tiny"))) as url, httpx.Client(base_url=url) as client:
        assert {("one", None), ("two", None), ("default", None)} <= set(rows(client))


def test_names_that_clients_think_of_are_bounded() -> None:
    activity = Activity()
    for number in range(1000):
        activity.ended("one", Ended(0.0, "ok"), f"name-{number}")
    parts = activity.parts("one")
    assert len(parts) == 201
    assert parts[None]["requests"]["ok"] == 800
    assert activity.parts("two") == {}
