"""OpenTelemetry spans of a request, and what a constraint on its tokens may do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import PromptError
from fused_kv_llm.report import telemetry


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    folder = tmp_path_factory.mktemp("kv")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32") as made:
        made.build_kv_cache(SHORT[:3], preprocess="wait", progress=False)
        yield made


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # The global provider can be set once in a process only.
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def _by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name.removeprefix("fused_kv."): span for span in exporter.get_finished_spans()}


def test_a_request_has_a_span_per_stage(engine: FusedKVEngine, spans: InMemorySpanExporter) -> None:
    with trace.get_tracer("user").start_as_current_span("outside"):
        report = engine.generate(rag_prompt(SHORT[:3]), max_tokens=3).report
    found = _by_name(spans)
    assert {"request", "prefill", "align", "load", "probe", "select", "fuse", "decode"} <= set(found)

    def parent(name: str) -> int | None:
        above = found[name].parent
        return above.span_id if above else None

    assert parent("request") == found["outside"].context.span_id
    assert {parent("prefill"), parent("decode")} == {found["request"].context.span_id}
    assert {parent(name) for name in ("align", "load", "probe", "select", "fuse")} == {found["prefill"].context.span_id}
    attributes = found["request"].attributes or {}
    assert attributes["fused_kv.reused_tokens"] == report.reused_tokens > 0
    assert attributes["gen_ai.request.model"] == engine.model_id


def test_a_stream_leaves_the_callers_span_alone(engine: FusedKVEngine, spans: InMemorySpanExporter) -> None:
    with trace.get_tracer("user").start_as_current_span("outside") as outside:
        stream = engine.stream(rag_prompt(SHORT[:2]), max_tokens=4)
        next(stream)
        assert trace.get_current_span() is outside
        stream.close()
    wait_until(lambda: {"request", "decode"} <= set(_by_name(spans)))


def test_a_request_that_fails_ends_its_span(engine: FusedKVEngine, spans: InMemorySpanExporter) -> None:
    with pytest.raises(PromptError):
        engine.generate([{"role": "user", "content": "hi", "images": "x"}])
    assert "request" in _by_name(spans)


def test_without_opentelemetry_requests_run(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_trace", None)
    assert engine.generate(rag_prompt(SHORT[:2]), max_tokens=2).token_ids


def test_a_constraint_sees_the_answer_so_far_and_decides(engine: FusedKVEngine) -> None:
    seen: list[list[int]] = []

    def only_even(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(token_ids))
        allowed = torch.arange(logits.shape[-1]) % 2 == 0
        return logits.masked_fill(~allowed, float("-inf"))

    made = engine.generate("Hello", max_tokens=5, constraint=only_even, temperature=1.0, seed=3)
    assert all(token % 2 == 0 for token in made.token_ids)
    assert seen == [made.token_ids[:n] for n in range(len(made.token_ids))]


def test_deleted_chunks_are_no_longer_found(engine: FusedKVEngine) -> None:
    extra = SHORT[5]
    engine.build_kv_cache([extra], progress=False)
    assert engine.generate(rag_prompt([extra]), max_tokens=1).report.chunks_found == 1
    assert engine.delete_chunks([f"  {extra}\n", "never stored, but long enough to be a chunk of its own"]) == 1
    assert engine.generate(rag_prompt([extra]), max_tokens=1).report.chunks_found == 0
