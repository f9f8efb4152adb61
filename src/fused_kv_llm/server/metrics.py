"""What is counted and timed for Prometheus; a name begins with ``vllm`` where it means what it means there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fused_kv_llm.report import FusionReport

from .savings import Saving

__all__ = ["Metrics"]

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._running = self._gauge("vllm:num_requests_running", "Answers that are being computed")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Answers that wait, or whose chunks are being loaded")
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("vllm:generation_tokens", "Tokens of answers")
        self._ended = self._counter("vllm:request_success", "Answers that ended", "finished_reason")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From request to first token", _TTFT_S)
        self._step = self._histogram("vllm:inter_token_latency_seconds", "From token to token, answers' means", _STEP_S)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From the request to its end", _WHOLE_S)
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._answers = self._histogram("vllm:request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens that earlier requests had left")
        self._tokens = self._counter("fused_kv:prompt_tokens", "Prompt tokens by what became of them", "source")
        self._chunks = self._counter("fused_kv:chunks", "Chunks in prompts, by whether their KV was used", "found")
        self._refused = self._counter("fused_kv:refused_requests", "Requests that were refused", "status")
        self._avoided = self._counter(
            "fused_kv:avoided_prefill_seconds", "Estimate: what computing reused tokens would have taken", "source"
        )
        self._spent = self._counter("fused_kv:reuse_seconds", "What was waited for stored KV, and for the selection")
        self._quota = self._counter("fused_kv:over_quota_requests", "Requests over a quota", "tenant", "quota")

    @contextmanager
    def request(self) -> Iterator[None]:
        """Time a request."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._whole.observe(time.perf_counter() - started_s)

    def answered(self, report: FusionReport, finish_reason: str) -> None:
        """Count an answer that has ended."""
        self._ended.labels(finish_reason).inc()
        self._prompt.inc(report.prompt_tokens)
        self._generated.inc(report.completion_tokens)
        self._ttft.observe(report.ttft_s)
        if "step" in report.seconds:
            self._step.observe(report.seconds["step"])
        self._prompts.observe(report.prompt_tokens)
        self._answers.observe(report.completion_tokens)
        self._queries.inc(report.prompt_tokens)
        self._hits.inc(report.prefix_cache_tokens)
        sources = {"header": report.prefix_tokens - report.prefix_cache_tokens, "prefix": report.prefix_cache_tokens,
                   "chunk": report.reused_tokens, "recomputed": report.recomputed_tokens,
                   "fresh": report.fresh_tokens}  # fmt: skip
        for source, tokens in sources.items():
            self._tokens.labels(source).inc(tokens)
        self._chunks.labels("true").inc(report.chunks_found)
        self._chunks.labels("false").inc(report.chunks_missed)

    def saved(self, saving: Saving) -> None:
        """Count what reuse has spared a request."""
        self._avoided.labels("prefix").inc(saving.prefix_s)
        self._avoided.labels("chunk").inc(saving.chunk_s)
        self._spent.inc(saving.spent_s)

    def refused(self, status: int) -> None:
        """Count a request that was refused."""
        self._refused.labels(str(status)).inc()

    def over_quota(self, tenant: str, quota: str) -> None:
        """Count a request that was more than its tenant's quota of requests or tokens."""
        self._quota.labels(tenant, quota).inc()

    def text(self, running: int, waiting: int) -> bytes:
        """Return everything in Prometheus' text format, with how many answers are being computed and wait now."""
        self._running.set(running)
        self._waiting.set(waiting)
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(name, what, registry=self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, what, buckets=buckets, registry=self._registry)
