"""A prompt in several ways, a measured full prefill, and words that no chunk holds, as clients ask for them."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from corpus import SHORT, rag_prompt
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.online import round_ratios
from fused_kv_llm.server import ServerConfig, comparing, create_app
from fused_kv_llm.server.answering import chat_prompt
from fused_kv_llm.tuning import SideBySide

MESSAGES = [{"role": "user", "content": rag_prompt(SHORT[:3])}]


def test_two_ways_beside_full_prefill(client: httpx.Client) -> None:
    columns = [{"recompute_ratio": 1}, {"selector": "cacheblend", "recompute_ratio": 0.2}, {}]
    found = client.post("/v1/compare", json={"messages": MESSAGES, "columns": columns, "max_tokens": 4}).json()
    full, blended, default = found["columns"]
    assert (full["kl"], full["agreement"], full["first_difference"]) == (0.0, 1.0, None)
    assert full["answer"] == found["reference"]["answer"]
    assert (blended["selector"], blended["recompute_ratio"]) == ("cacheblend", 0.2)
    assert blended["report"]["reused_tokens"] > 0
    assert default["selector"]
    assert 0.0 < blended["ttft_s"] == blended["report"]["ttft_s"] or blended["ttft_s"] < blended["report"]["ttft_s"]


def test_a_ratio_may_be_adaptive(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "columns": [{"recompute_ratio": "adaptive"}, {}], "max_tokens": 4}
    adaptive, fixed = client.post("/v1/compare", json=body).json()["columns"]
    assert adaptive["recompute_ratio"] in round_ratios(0.5)
    assert adaptive["report"]["expected_divergence"] >= 0
    assert adaptive["kl"] >= 0
    assert fixed["recompute_ratio"] == 0.15


def test_what_cannot_be_compared_is_refused(client: httpx.Client) -> None:
    good = {"messages": MESSAGES, "columns": [{}]}
    wrong = (
        {"columns": []}, {"columns": [{}] * 5}, {"columns": [{"selector": "none"}]}, {"max_tokens": 129},
        {"columns": [{"recompute_ratio": 2}]}, {"retrieve": {"k": 2}}, {"stream": True}, {"messages": []},
        {"columns": [{}, {"selector": "cacheblend", "recompute_ratio": "adaptive"}]},
    )  # fmt: skip
    for change in wrong:
        assert client.post("/v1/compare", json=good | change).status_code == 400, change
    assert client.post("/v1/compare", json=good | {"model": "another"}).status_code == 404


def test_a_full_prefill_is_measured(client: httpx.Client) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json=body).json()
    wait_until(lambda: client.get(f"/v1/requests/{answer['id']}").status_code == 200)
    found = client.post(f"/v1/requests/{answer['id']}/measure").json()
    assert found["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["full_prefill_s"] > 0
    assert client.post("/v1/requests/chatcmpl-none/measure").status_code == 404


def test_comparisons_count_against_quotas(engine: FusedKVEngine) -> None:
    config = ServerConfig(model_name="tiny", quotas={"default": {"requests_per_minute": 1}})
    with running(create_app(engine, config)) as url, httpx.Client(base_url=url, timeout=60) as client:
        body = {"messages": MESSAGES, "columns": [{"recompute_ratio": 1}], "max_tokens": 1}
        assert client.post("/v1/compare", json=body).status_code == 200
        assert client.post("/v1/compare", json=body).status_code == 429


def test_who_leaves_pays_and_is_not_worked_for(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(model_name="tiny", quotas={"default": {"tokens_per_minute": 100_000}})
    app = create_app(engine, config)
    spent, building, go_on = list[int](), threading.Event(), threading.Event()
    monkeypatch.setattr(app.state.fused_kv.quotas, "spend", lambda tenant, tokens: spent.append(tokens))

    def slowly(*args: Any) -> Any:
        building.set()
        go_on.wait(10)
        return chat_prompt(*args)

    body = {"messages": MESSAGES, "columns": [{}], "max_tokens": 128}
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        # One leaves while its prompt is made: nothing is answered for it.
        with monkeypatch.context() as patch:
            patch.setattr(comparing, "chat_prompt", slowly)
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/compare", json=body, timeout=0.5)
            assert building.is_set()
            time.sleep(0.2)
            go_on.set()
            wait_until(lambda: spent == [0])
        # One leaves in the midst of it: what was answered counts.
        full = SideBySide.full_prefill

        def late(both: SideBySide, ways: Any) -> Any:
            full(both)
            both.cancel()
            return full(both)

        monkeypatch.setattr(SideBySide, "compare", late)
        client.post("/v1/compare", json=body)
        wait_until(lambda: len(spent) == 2)
        assert spent[1] > 50


def test_a_comparison_has_until_the_timeout(engine: FusedKVEngine) -> None:
    app = create_app(engine, ServerConfig(model_name="tiny", request_timeout_s=0.001))
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/v1/compare", json={"messages": MESSAGES, "columns": [{}]}).status_code == 504


def test_few_go_on_at_once(engine: FusedKVEngine) -> None:
    app = create_app(engine, ServerConfig(model_name="tiny"))
    state = app.state.fused_kv
    body = {"messages": MESSAGES, "columns": [{"recompute_ratio": 1}], "max_tokens": 1}
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client, ExitStack() as taken:
        for _ in range(4):
            taken.enter_context(state.comparisons.one(""))
        refused = client.post("/v1/compare", json=body)
        assert (refused.status_code, int(refused.headers["retry-after"])) == (429, 5)
        taken.close()
        assert client.post("/v1/compare", json=body).status_code == 200
        for _ in range(2):
            taken.enter_context(state.estimates.one(""))
        assert client.post("/v1/documents/estimate", json={"text": SHORT[0]}).status_code == 429
        taken.close()
        assert client.post("/v1/documents/estimate", json={"text": SHORT[0]}).status_code == 200


def test_what_no_chunk_holds_is_found(client: httpx.Client) -> None:
    sent = {"answer": "It is 39 metres high.", "chunks": ["The lighthouse is 38 metres high."]}
    found = client.post("/v1/support", json=sent).json()
    assert found == {"share": 2 / 3, "spans": [{"start": 6, "end": 8, "text": "39"}]}
    for answer, chunks in (("a", ["a"] * 257), ("a", ["a" * 100_001] * 2), ("a" * 200_001, [])):
        assert client.post("/v1/support", json={"answer": answer, "chunks": chunks}).status_code == 400
