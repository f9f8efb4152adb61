"""Models, health, metrics and tokens; and a server that ends what it has begun."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from corpus import SHORT, rag_prompt
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from server.running import running

from fused_kv_llm import FusedKVEngine, __version__
from fused_kv_llm.prompt import RawPrompt
from fused_kv_llm.server import ServerConfig, create_app

PROMPT = rag_prompt(SHORT[:3], "What about the ferries?")


def test_models(client: httpx.Client, engine: FusedKVEngine) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", engine.context_length)
    assert client.get("/v1/models/tiny").json() == model


def test_health_and_version(client: httpx.Client) -> None:
    assert client.get("/health").status_code == client.get("/ready").status_code == 200
    assert client.head("/health").status_code == client.head("/ready").status_code == 200
    assert client.get("/version").json() == {"version": __version__}


def test_tokens(client: httpx.Client, engine: FusedKVEngine) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    for body, want in (({"prompt": PROMPT}, RawPrompt(PROMPT)), ({"messages": messages}, messages)):
        answer = client.post("/tokenize", json={"model": "tiny", **body}).json()
        ids = engine.encode(want)
        assert answer == {"count": len(ids), "max_model_len": engine.context_length, "tokens": ids}
    for wrong in ({}, {"prompt": ""}, {"prompt": "a", "messages": messages}):
        assert client.post("/tokenize", json=wrong).status_code == 400


def test_metrics(engine: FusedKVEngine) -> None:
    engine.clear_prefix_cache()
    with running(create_app(engine, ServerConfig(model_name="tiny"))) as url:
        body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
        reports = [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["fused_kv"] for _ in range(2)]
        httpx.post(f"{url}/v1/chat/completions", json={**body, "model": "other"})
        text = httpx.get(f"{url}/metrics").text
    found: dict[tuple[str, ...], Any] = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["vllm:prompt_tokens_total",] == sum(report["prompt_tokens"] for report in reports)
    assert found["vllm:generation_tokens_total",] == 6
    assert found["vllm:request_success_total", "length"] == 2
    assert found["vllm:prefix_cache_hits_total",] == reports[1]["prefix_cache_tokens"] > 0
    assert found["vllm:time_to_first_token_seconds_count",] == 2
    assert found["vllm:num_requests_running",] == found["vllm:num_requests_waiting",] == 0
    for source, name in (("chunk", "reused_tokens"), ("recomputed", "recomputed_tokens"), ("fresh", "fresh_tokens")):
        assert found["fused_kv:prompt_tokens_total", source] == sum(report[name] for report in reports)
    total = sum(value for (name, *_), value in found.items() if name == "fused_kv:prompt_tokens_total")
    assert total == found["vllm:prompt_tokens_total",]
    assert found["fused_kv:refused_requests_total", "404"] == 1


def test_a_server_that_is_about_to_stop(engine: FusedKVEngine) -> None:
    app = create_app(engine, ServerConfig(model_name="tiny"))
    with running(app) as url:
        app.state.fused_kv.draining = True
        assert httpx.get(f"{url}/health").status_code == 200
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
        for response in (httpx.get(f"{url}/ready"), httpx.post(f"{url}/v1/chat/completions", json=body)):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_request_belongs_to_its_callers_trace(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    ids = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    headers = {"traceparent": f"00-{ids[0]}-{ids[1]}-01"}
    for given in (headers, {}):
        assert client.post("/v1/chat/completions", json=body, headers=given).status_code == 200
    requests = [span for span in exporter.get_finished_spans() if span.name == "fused_kv.request"]
    told, other = requests
    assert told.parent is not None
    assert (f"{told.context.trace_id:032x}", f"{told.parent.span_id:016x}") == ids
    assert other.parent is None
