"""Buffers go from request to request and nothing leaks with them."""

from __future__ import annotations

from pathlib import Path

import torch
from corpus import SHORT, rag_prompt
from hypothesis import given
from hypothesis import strategies as st
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
    assert pool.kept_nbytes() == first.nbytes, "buffers above the limit are not kept"


def test_requests_that_run_at_once_find_their_buffers_again() -> None:
    """Each of several users' next requests takes the memory of a former one, the smallest that it fits into."""
    pool = CachePool(torch.float32, torch.device("cpu"), max_bytes=4 * 3700)
    held = [pool.take(numel) for numel in (1000, 1200, 1400)]
    places = {buffer.data_ptr() for buffer in held}
    for buffer in held:
        pool.give_back(buffer)
    assert pool.take(1100).data_ptr() == held[1].data_ptr()
    pool.give_back(held[1])
    assert {pool.take(numel).data_ptr() for numel in (990, 1190, 1390)} == places
    for buffer in held:
        pool.give_back(buffer)
    pool.give_back(torch.empty(1300))
    assert pool.kept_nbytes() == 4 * (1408 + 1300), "the smallest go where there is no room for all"


@given(numel=st.integers(min_value=1, max_value=10**7))
def test_a_buffer_is_hardly_larger_than_asked_for(numel: int) -> None:
    pool = CachePool(torch.float32, torch.device("meta"))
    assert numel <= pool.take(numel).numel() <= numel + numel // 16 + 1


def test_what_a_former_request_left_changes_nothing(tmp_path: Path) -> None:
    with FusedKVEngine(tiny_model(), preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=tmp_path) as engine:
        engine.build_kv_cache(SHORT[:5], progress=False)
        prompts = [rag_prompt(SHORT[i : i + 3], f"Question {i}?") for i in range(3)]
        for selector in ("fusionrag", "prophetkv", "boundary"):
            for prompt in prompts:
                want = engine.generate(prompt, max_tokens=5, selector=selector).token_ids
                kept = engine.requests.context.pool.take(1)
                poisoned = torch.full((4 * 10**6,), float("nan"))
                engine.requests.context.pool.take = lambda numel, buffer=poisoned, **kwargs: buffer  # type: ignore[method-assign]
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
            engine.requests.context.pool.take = lambda numel, buffer=poisoned, **kwargs: buffer  # type: ignore[method-assign]
            fused, report = engine.prefill(SHORT[0], recompute_ratio=0.15, selector="all_layers")
            assert report.fresh_tokens == 1
            selections.append(fused.selected.tolist())
        assert selections[0] == selections[1] == selections[2]
