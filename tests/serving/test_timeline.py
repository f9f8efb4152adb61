"""Each request's timeline says when its stages really were, beside others and after waiting."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine

STAGES = ("queue", "align", "probe", "fuse", "decode")


@pytest.mark.parametrize("selector", ["sink_attention", "cacheblend"])
def test_stages_are_in_order_within_the_request(tmp_path: Path, selector: str) -> None:
    prompts = [rag_prompt(SHORT[number : number + 3], "What about the ferries?") for number in range(3)]
    with FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, dtype="float32", preprocessing="none",
        prefix_cache_bytes=0, max_batched_rows=24, max_num_seqs=2, selector=selector, recompute_ratio=0.3,
    ) as engine:  # fmt: skip
        engine.build_kv_cache(SHORT[:6], progress=False)
        asked_s = time.perf_counter()
        handles = [engine.submit(prompt, max_tokens=12) for prompt in prompts]
        reports = [handle.result().report for handle in handles]
        took_s = time.perf_counter() - asked_s
    for report in reports:
        first = {one.stage: one for one in reversed(report.timeline)}
        last = {one.stage: one for one in report.timeline}
        assert first["queue"].start_s == 0.0
        computed_s = min(first["probe"].start_s, first["fuse"].start_s)
        assert first["queue"].end_s <= first["align"].start_s < computed_s < first["decode"].start_s
        assert max(last["probe"].end_s, last["fuse"].end_s) <= first["decode"].start_s
        assert first["decode"].start_s == pytest.approx(report.ttft_s, abs=0.2)
        assert last["decode"].end_s <= took_s
        for stage in STAGES:
            entries = [one.end_s - one.start_s for one in report.timeline if one.stage == stage]
            assert sum(entries) == pytest.approx(report.seconds[stage], abs=0.1)
    # Two are answered at once, and the last to begin, whichever that is, waits for one of them to end.
    begun_s = [
        report.called_s + min(one.start_s for one in report.timeline if one.stage in ("probe", "fuse"))
        for report in reports
    ]
    last_one = begun_s.index(max(begun_s))
    others = (report for number, report in enumerate(reports) if number != last_one)
    assert begun_s[last_one] >= min(report.called_s + report.timeline[-1].end_s for report in others)
