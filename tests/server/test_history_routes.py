"""The request log as clients read it: every request once, its own tenant's only, by its answer's id or its name."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from server.running import events, running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.server import ServerConfig, create_app, history_file

SECRET = "Which ship is the flagship?"
MESSAGES = [{"role": "user", "content": rag_prompt(SHORT[:3], SECRET)}]
BODY = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "temperature": 0}
KEYS = {"one": "the-key-of-tenant-one", "two": "the-key-of-tenant-two"}
ROUTE = "/v1/chat/completions"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    folder = tmp_path_factory.mktemp("history")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as made:
        made.build_kv_cache(SHORT[:3], progress=False)
        yield made


@contextmanager
def served(engine: FusedKVEngine, **options: Any) -> Iterator[httpx.Client]:
    app = create_app(engine, ServerConfig(model_name="tiny", **options))
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def by_key(tenant: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}", **headers}


def file_of(engine: FusedKVEngine) -> Path:
    return Path(engine.store.kv_dir) / "requests" / "requests.sqlite"


def test_an_answer_leads_to_its_row(stored: FusedKVEngine) -> None:
    with served(stored) as client:
        response = client.post(ROUTE, json=BODY, headers={"x-request-id": "mine-1"})
        answer, report = response.json(), response.json()["fused_kv"]
        row = client.get(f"/v1/requests/{answer['id']}").json()
        assert client.get("/v1/requests/mine-1").json() == row
        listed = client.get("/v1/requests", params={"limit": 1}).json()["data"][0]
        assert listed.items() <= row.items()
        assert (row["status"], row["http_status"], row["endpoint"]) == ("ok", 200, ROUTE)
        for name in ("prompt_tokens", "prefix_tokens", "reused_tokens", "recomputed_tokens", "fresh_tokens", "ttft_s"):
            assert row[name] == report[name]
        assert row["completion_tokens"] == 3
        assert row["latency_s"] >= row["ttft_s"] > 0
        assert row["verdicts"] == {"reused": 3}
        assert row["question"] == MESSAGES[0]["content"][:200]
        assert row["messages"] == MESSAGES
        assert row["answer"] == answer["choices"][0]["message"]["content"]
        assert row["report"] == report
        assert row["options"] == {"max_tokens": 3, "temperature": 0}
        assert (file_of(stored).stat().st_mode & 0o777, file_of(stored).parent.stat().st_mode & 0o777) == (0o600, 0o700)

        trace = client.get(f"/v1/requests/{answer['id']}/trace").json()
        assert SECRET in trace["text"]
        assert len(trace["tokens"]) == len(trace["states"]) == len(trace["chunk"]) == row["prompt_tokens"]

        assert client.delete(f"/v1/requests/{answer['id']}").json()["deleted"]
        for found in (client.get(f"/v1/requests/{answer['id']}"), client.delete("/v1/requests/mine-1")):
            assert found.status_code == 404
        assert client.get("/v1/requests", params={"limit": 1}).json()["data"] != [listed]


def test_every_way_a_request_ends(stored: FusedKVEngine) -> None:
    with served(stored) as client:
        wrong = [{**BODY, "model": "other"}, {**BODY, "best_of": 4}, {**BODY, "messages": []}]
        assert all(client.post(ROUTE, json=body).status_code >= 400 for body in wrong)
        events(client.post(ROUTE, json={**BODY, "stream": True}).text)
        with client.stream("POST", ROUTE, json={**BODY, "stream": True, "max_tokens": 1800}) as response:
            next(response.iter_lines())
        text = {"model": "tiny", "prompt": "Once", "max_tokens": 2, "n": 2}
        assert client.post("/v1/completions", json=text).status_code == 200

        def rows() -> list[dict[str, Any]]:
            return client.get("/v1/requests", params={"limit": 6}).json()["data"]

        wait_until(lambda: [row["status"] for row in rows()].count("cancelled") == 1)
        found = sorted(rows(), key=lambda row: row["created_s"])
        assert [(row["status"], row["http_status"]) for row in found] == [
            ("refused", 404), ("refused", 400), ("refused", 400), ("ok", 200), ("cancelled", 499), ("ok", 200),
        ]  # fmt: skip
        assert [row["stream"] for row in found[3:]] == [True, True, False]
        assert found[0]["error"]["code"] == "model_not_found"
        assert "best_of" in found[1]["error"]["message"]
        assert (found[5]["endpoint"], found[5]["completion_tokens"]) == ("/v1/completions", 4)
        assert found[5]["id"].startswith("cmpl-")
        detail = client.get(f"/v1/requests/{found[4]['id']}").json()
        # What was computed until its client left is known.
        assert detail["report"]["prompt_tokens"] == found[4]["prompt_tokens"] == found[3]["prompt_tokens"]
        assert 1 <= found[4]["completion_tokens"] < 1800
        refused = client.get(f"/v1/requests/{found[0]['id']}/trace")
        assert refused.json()["error"]["code"] == "no_trace"


def test_an_error_in_the_middle_of_a_stream(stored: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(stored, request_timeout_s=0.05) as client:
        text = client.post(ROUTE, json={**BODY, "stream": True, "max_tokens": 1800}).text
        assert "deadline_exceeded" in text
        row = client.get("/v1/requests").json()["data"][0]
        assert (row["status"], row["http_status"], row["error"]["code"]) == ("failed", 504, "deadline_exceeded")


def test_pages_and_filters(stored: FusedKVEngine) -> None:
    with served(stored) as client:
        stored.clear_prefix_cache()
        for ratio in (1.0, 0.0, 0.0):
            client.post(ROUTE, json={**BODY, "fused_kv": {"recompute_ratio": ratio}})
        newest = client.get("/v1/requests", params={"limit": 3}).json()
        ids = [row["id"] for row in newest["data"]]
        assert newest["has_more"]
        assert [row["created_s"] for row in newest["data"]] == sorted(r["created_s"] for r in newest["data"])[::-1]
        after = client.get("/v1/requests", params={"limit": 2, "before": ids[0]}).json()["data"]
        assert [row["id"] for row in after] == ids[1:]

        since = {"since_s": newest["data"][2]["created_s"]}

        def found(**wanted: Any) -> list[str]:
            return [row["id"] for row in client.get("/v1/requests", params={**since, **wanted}).json()["data"]]

        assert found() == ids
        assert found(until_s=newest["data"][1]["created_s"]) == ids[1:]
        # The third one finds the second's KV in the tree of prompts, which is no chunk's.
        assert found(min_reused=0.3) == [ids[1]]
        assert found(verdict="recomputed") == [ids[2]]
        assert (found(status="ok"), found(status="failed"), found(selector="no_such")) == (ids, [], [])
        for wrong in ({"verdict": "x"}, {"limit": 0}, {"min_reused": 2}, {"since_s": "nan"}, {"status": "good"}):
            assert client.get("/v1/requests", params=wrong).status_code == 400


def test_a_tenant_sees_its_own_only(stored: FusedKVEngine) -> None:
    with served(stored, api_keys=KEYS, request_log="texts") as client:
        mine = client.post(ROUTE, json=BODY, headers=by_key("one", **{"x-request-id": "same"})).json()["id"]
        other = client.post(ROUTE, json=BODY, headers=by_key("two", **{"x-request-id": "same"})).json()["id"]
        assert [row["id"] for row in client.get("/v1/requests", headers=by_key("one")).json()["data"]] == [mine]
        assert client.get("/v1/requests/same", headers=by_key("one")).json()["id"] == mine
        for path in (f"/v1/requests/{other}", f"/v1/requests/{other}/trace"):
            assert client.get(path, headers=by_key("one")).status_code == 404
        assert client.delete(f"/v1/requests/{other}", headers=by_key("one")).status_code == 404
        assert client.get("/v1/requests", headers=by_key("one"), params={"before": other}).json()["data"] == []
        assert client.get(f"/v1/requests/{other}", headers=by_key("two")).status_code == 200
        numbers = client.get("/v1/operations", headers=by_key("one")).json()
        assert numbers["since_start"]["requests"] == {"ok": 1, "cancelled": 0, "refused": 0, "failed": 0}
        assert "running" not in numbers
        # The chunks are those of nobody, so this tenant has none.
        assert numbers["store"]["tiers"]["disk"]["chunks"] == 0
        assert {row["tenant"] for row in numbers["tenants"]} == {"one"}
        assert client.get("/v1/requests").status_code == 401


def test_without_texts_no_word_is_kept(stored: FusedKVEngine) -> None:
    words = {"Aldebaran", "flagship", "needle"}
    with served(stored, request_log="counts") as client:
        expected = {"expected": ["A needle that is nowhere in the prompt."], "tenant": "needle"}
        body = {**BODY, "fused_kv": expected, "stop": "needle", "user": "needle"}
        answer = client.post(ROUTE, json=body).json()
        assert client.post(ROUTE, json={**BODY, "model": "needle"}).status_code == 404
        row = client.get(f"/v1/requests/{answer['id']}").json()
        assert row["report"]["prompt_tokens"] == row["prompt_tokens"] > 0
        assert row["verdicts"]["not_ingested"] == 1
        assert [row[name] for name in ("question", "messages", "answer", "chunks")] == [None] * 4
        assert client.get(f"/v1/requests/{answer['id']}/trace").json()["error"]["code"] == "texts_not_kept"
        told = json.dumps([row, client.get("/v1/requests", params={"limit": 2}).json()])
        assert not {word for word in words if word in told}


def test_nothing_is_kept_where_that_is_wanted(stored: FusedKVEngine) -> None:
    with served(stored) as client:
        before = client.get("/v1/requests").json()["data"]
    with served(stored, request_log="off") as client:
        client.post(ROUTE, json=BODY)
        assert client.get("/v1/requests").json()["error"]["code"] == "requests_not_kept"
        assert client.get("/v1/operations").json()["since_start"]["requests"]["ok"] == 1
    with served(stored) as client:
        assert client.get("/v1/requests").json()["data"] == before


def test_beside_an_encrypted_store_no_texts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("FUSED_KV_ENCRYPTION_KEY", "ab" * 32)
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as made:
        monkeypatch.delenv("FUSED_KV_ENCRYPTION_KEY")
        with pytest.raises(ConfigError, match="beside an encrypted store"):
            create_app(made, ServerConfig(request_log="texts"))
        with served(made) as client:
            answer = client.post(ROUTE, json=BODY).json()
            row = client.get(f"/v1/requests/{answer['id']}").json()
        assert (row["status"], row["messages"], row["question"], row["detail_available"]) == ("ok", None, None, False)


def test_answers_go_on_without_the_log(
    stored: FusedKVEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(history_file, "_prepare", broken)
    with served(stored, sweep_s=0.05) as client:
        for _ in range(3):
            assert client.post(ROUTE, json=BODY).status_code == 200
            time.sleep(0.1)
        assert client.get("/v1/operations").json()["since_start"]["requests"]["ok"] == 3
    assert [one.levelname for one in caplog.records if "disk is full" in one.getMessage()] == ["ERROR"]
