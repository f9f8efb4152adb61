"""Prefetching brings all that a request reads: chunk KV, context shifts, and the anchors of the engine's selector."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from corpus import SHORT, UnusedEmbedder, rag_prompt
from models import smollm2_tokenizer, tiny_model
from waiting import wait_until

from fused_kv_llm import FusedKVEngine

GRAPH = {text: [other for other in SHORT[:4] if other != text][:2] for text in SHORT[:4]}


@pytest.mark.parametrize(
    ("selector", "sidecars"),
    [
        ("sink_attention", {"context_shift"}),
        ("qcfuse", {"context_shift", "anchors"}),
        ("sink_attention_anchors", {"context_shift", "anchors"}),
    ],
)
def test_a_request_reads_nothing_after_a_prefetch(
    selector: str, sidecars: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"preprocessing": "similar", "embedder": UnusedEmbedder(), "store_misses": False, "selector": selector}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:4], neighbours=GRAPH, preprocess="wait", progress=False)
        store, prompt = engine.store, rag_prompt(SHORT[:4])
        copies = 2 if selector == "sink_attention_anchors" else 1
        assert store.stats().sidecars["disk"][0] == 4 * (1 + copies * ("anchors" in sidecars))
        engine.prefill(prompt, recompute_ratio=0.2)
        engine.prefill(prompt, recompute_ratio=0.2)
        everything = store.stats().memory_bytes
        store.drop_memory()
        engine.prefetch(SHORT[:4])
        wait_until(lambda: store.stats().memory_bytes >= everything)
        monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read from a file"))
        _, report = engine.prefill(prompt, recompute_ratio=0.2)
        assert set(report.bytes_loaded) == {"memory"}
        assert set(report.sidecar_bytes_loaded) == sidecars
