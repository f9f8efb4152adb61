"""Buffers go from request to request and nothing leaks with them."""

from __future__ import annotations

from pathlib import Path

import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import CachePool


def test_a_buffer_is_reused_when_it_fits() -> None:
    pool = CachePool(torch.float32, torch.device("cpu"), max_bytes=4000)
    first = pool.take(100)
    pool.give_back(first)
    assert pool.take(50).data_ptr() == first.data_ptr()
    assert pool.take(100).data_ptr() != first.data_ptr()
    pool.give_back(first)
    assert pool.take(20).numel() == 20, "a much larger buffer is not held by a small request"
    pool.give_back(torch.empty(2000))
    assert pool.take(1500).numel() == 1500, "buffers above the limit are not kept"


def test_what_a_former_request_left_changes_nothing(tmp_path: Path) -> None:
    with FusedKVEngine(tiny_model(), preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=tmp_path) as engine:
        engine.build_kv_cache(SHORT[:5], progress=False)
        prompts = [rag_prompt(SHORT[i : i + 3], f"Question {i}?") for i in range(3)]
        for selector in ("fusionrag", "prophetkv", "boundary"):
            for prompt in prompts:
                want = engine.generate(prompt, max_tokens=5, selector=selector).token_ids
                kept = engine.requests.context.pool.take(1)
                poisoned = torch.full((4 * 10**6,), float("nan"))
                engine.requests.context.pool.take = lambda numel, buffer=poisoned: buffer  # type: ignore[method-assign]
                assert engine.generate(prompt, max_tokens=5, selector=selector).token_ids == want
                del engine.requests.context.pool.take
                engine.requests.context.pool.give_back(kept)


def test_a_probe_of_one_row_reads_nothing_stale(tmp_path: Path) -> None:
    """A raw prompt that is only a chunk leaves one fresh row: the question of the probe."""
    with FusedKVEngine(
        tiny_model(), preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, wrap_chat_template=False
    ) as engine:
        engine.build_kv_cache(SHORT[:1], progress=False)
        selections = []
        for poison in (0.0, 5.0, float("nan")):
            poisoned = torch.full((10**6,), poison)
            engine.requests.context.pool.take = lambda numel, buffer=poisoned: buffer  # type: ignore[method-assign]
            fused, report = engine.prefill(SHORT[0], recompute_ratio=0.15, selector="all_layers")
            assert report.fresh_tokens == 1
            selections.append(fused.selected.tolist())
        assert selections[0] == selections[1] == selections[2]
