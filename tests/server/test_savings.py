"""Seconds saved: an estimate from measured prefills, of tokens and not of requests, less what reuse cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from prometheus_client.parser import text_string_to_metric_families
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine, FusionReport
from fused_kv_llm.server import ServerConfig, create_app
from fused_kv_llm.server.activity import Activity, Ended
from fused_kv_llm.server.savings import Saving, Savings
from fused_kv_llm.store import RecomputeCost

MILLISECOND_A_TOKEN = RecomputeCost((0, 512), (16, 512), [[0.016, 0.512], [0.016, 0.512]])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False, "recompute_ratio": 0.2}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as made:
        made.build_kv_cache(SHORT[:3], progress=False)
        yield made


def savings(prefill_s: Any) -> Savings:
    return Savings(SimpleNamespace(corpus=SimpleNamespace(cost=SimpleNamespace(prefill_s=prefill_s))))  # type: ignore[arg-type]


def test_what_one_request_was_spared() -> None:
    asked = []

    def prefill_s(cached: int, new: int) -> float:
        asked.append((cached, new))
        return new / 1000

    seconds = {"load": 0.02, "probe": 0.01, "select": 0.005, "fuse": 0.3, "queue": 9.0}
    report = FusionReport(
        prompt_tokens=1024, prefix_tokens=124, prefix_cache_tokens=100, reused_tokens=600, recomputed_tokens=200,
        fresh_tokens=100, seconds=seconds, read_s=0.003,
    )  # fmt: skip
    found = savings(prefill_s).of(report)
    assert asked == [(24, 1000)]
    assert found == pytest.approx(Saving(prefix_s=0.1, chunk_s=0.6, spent_s=0.038))
    assert found.saved_s == pytest.approx(0.662)
    # Nothing was reused, and nothing spared; what was lost is told too.
    nothing = FusionReport(prompt_tokens=1024, prefix_tokens=24, fresh_tokens=1000, seconds={"load": 0.02})
    assert savings(prefill_s).of(nothing) == Saving(0.0, 0.0, 0.02)
    assert savings(lambda *_: None).of(report) is None


def test_times_are_taken_once_when_nobody_is_answered_and_it_is_quick(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, found = [], Savings(engine)
    monkeypatch.setattr(engine.corpus, "measure_cost", lambda: taken.append(1))
    found.measure()
    assert taken == [], "before the first answer nobody knows how long it takes"
    for token_s, times in ((0.1, 0), (0.001, 1)):
        found.of(FusionReport(prompt_tokens=10, fresh_tokens=10, seconds={"fuse": 10 * token_s}))
        found.measure()
        assert len(taken) == times
    with closing(engine.stream("Tell a long story", max_tokens=1500)) as pieces:
        next(pieces)
        found.measure()
        assert len(taken) == 1
    monkeypatch.undo()
    wait_until(lambda: not engine.is_busy)
    assert Savings(engine).measure() is False
    assert found.measure() is True
    assert found.measure() is False


def test_the_server_tells_it_everywhere_alike(engine: FusedKVEngine) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": rag_prompt(SHORT[:3], "Which ships?")}]}
    app = create_app(engine, ServerConfig(model_name="tiny", max_answer_tokens=2))
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.post("/v1/chat/completions", json=body)
        assert client.get("/v1/requests").json()["data"][0]["saved_s"] is None
        engine.corpus.cost.seconds = MILLISECOND_A_TOKEN
        engine.clear_prefix_cache()
        reports = [client.post("/v1/chat/completions", json=body).json()["fused_kv"] for _ in range(2)]
        rows = client.get("/v1/requests", params={"limit": 2}).json()["data"]
        since = client.get("/v1/operations").json()["since_start"]
        families = text_string_to_metric_families(client.get("/metrics").text)
    assert reports[0]["reused_tokens"] > 0
    assert reports[0]["read_s"] > 0
    assert reports[1]["prefix_cache_tokens"] > 0
    saved = since["saved"]
    assert saved["chunk_s"] == pytest.approx(sum(report["reused_tokens"] for report in reports) / 1000)
    assert saved["prefix_s"] == pytest.approx(sum(report["prefix_cache_tokens"] for report in reports) / 1000)
    assert saved["spent_s"] > reports[0]["read_s"]
    assert saved["saved_s"] == pytest.approx(sum(row["saved_s"] for row in rows))
    assert saved["requests_unknown"] == 1
    metrics = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert metrics["fused_kv:avoided_prefill_seconds_total", "chunk"] == pytest.approx(saved["chunk_s"])
    assert metrics["fused_kv:avoided_prefill_seconds_total", "prefix"] == pytest.approx(saved["prefix_s"])
    assert metrics["fused_kv:reuse_seconds_total",] == pytest.approx(saved["spent_s"])
    # Rates are of tokens, apart, and without the header that every prompt has.
    tokens, rates = since["tokens"], since["hit_rates"]
    looked_up = sum(tokens[name] for name in ("prefix", "chunk", "recomputed", "fresh"))
    assert rates["prefix"] == pytest.approx(tokens["prefix"] / looked_up)
    assert rates["chunk"] == pytest.approx(tokens["chunk"] / looked_up)
    assert tokens["header"] > 0


def test_the_last_minutes_and_the_whole_time() -> None:
    now_s = [1000.0]
    activity = Activity(lambda: now_s[0])
    for number in range(1, 101):
        now_s[0] += 1
        activity.began("a")
        activity.ended("a", Ended(now_s[0], "ok" if number % 4 else "failed", number / 100))
    activity.began("a")
    found = activity.of("a", 20)
    assert found["open"] == 1
    assert found["since_start"]["requests"] == {"ok": 75, "cancelled": 0, "refused": 0, "failed": 25}
    assert found["recent"]["requests"] == {"ok": 15, "cancelled": 0, "refused": 0, "failed": 5}
    assert found["since_start"]["ttft_s"] == {"p50": 0.5, "p95": 0.95, "of": 100}
    assert found["recent"]["ttft_s"] == {"p50": 0.9, "p95": 0.99, "of": 20}
    nobody = activity.of("b", 20)["since_start"]
    assert nobody["ttft_s"] == {"p50": None, "p95": None, "of": 0}
    assert nobody["hit_rates"] == {"prefix": None, "chunk": None}
