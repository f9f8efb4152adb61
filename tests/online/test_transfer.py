"""Deviation transfer: exact chunks stay as they are, others come closer to full prefill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from corpus import PASSAGES, SHORT, UnusedEmbedder, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.selectors import SELECTORS, SinkAttention, transfer_strength


def test_a_chunk_that_is_exact_is_not_changed(tmp_path: Path) -> None:
    """One chunk right after the header it was prefilled with has no deviation to transfer."""
    options = {"preprocessing": "none", "store_misses": False, "wrap_chat_template": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:1], progress=False)
        prompt = SHORT[0] + "\n\nWhat is it about, please?"
        want, _ = engine.prefill(prompt, recompute_ratio=1.0)
        got, report = engine.prefill(prompt, recompute_ratio=0.3, selector=SinkAttention(transfer=1.0))
        assert 0 < report.recomputed_tokens < report.prompt_tokens // 2
        count = report.prompt_tokens
        for name in ("keys", "values"):
            kv = [getattr(fused.cache, name)[..., :count, :] for fused in (got, want)]
            torch.testing.assert_close(*kv, atol=1e-4, rtol=1e-4)


@pytest.mark.real_model
def test_transfer_brings_the_kv_of_other_tokens_closer_to_full_prefill(tmp_path: Path) -> None:
    with FusedKVEngine("smollm2-135m", kv_dir=tmp_path, preprocessing="none", store_misses=False) as engine:
        engine.build_kv_cache(PASSAGES[:5], progress=False)
        prompt = rag_prompt(PASSAGES[:5])
        full, _ = engine.prefill(prompt, recompute_ratio=1.0)
        error = {}
        for strength in (0.0, 0.5):
            fused, report = engine.prefill(prompt, selector=SinkAttention(transfer=strength), recompute_ratio=0.15)
            count = report.prompt_tokens
            untouched = torch.ones(count, dtype=torch.bool)
            untouched[fused.selected] = False
            for name in ("keys", "values"):
                got, want = (getattr(f.cache, name)[..., :count, :][..., untouched, :].float() for f in (fused, full))
                error[name, strength] = float((got - want).pow(2).mean())
            fused.cache.release()
        assert error["keys", 0.5] < 0.97 * error["keys", 0.0]
        assert error["values", 0.5] < 0.97 * error["values", 0.0]


def test_strengths() -> None:
    default = SELECTORS["sink_attention"]
    assert [transfer_strength(default, shifted=shifted) for shifted in (True, False)] == [0.25, 0.5]
    assert [transfer_strength(SinkAttention(transfer=0.4), shifted=shifted) for shifted in (True, False)] == [0.4, 0.4]
    assert [transfer_strength(SELECTORS["cacheblend"], shifted=shifted) for shifted in (True, False)] == [0.0, 0.0]


@pytest.mark.parametrize(("preprocessing", "strength"), [("none", 0.5), ("similar", 0.25)])
def test_the_default_transfers_more_where_kv_has_no_context_shifts(
    tmp_path: Path, preprocessing: str, strength: float
) -> None:
    options = {"preprocessing": preprocessing, "embedder": UnusedEmbedder(), "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:5], preprocess="later", progress=False)
        prompt = rag_prompt(SHORT[:5])
        own, other = SinkAttention(transfer=strength), SinkAttention(transfer=0.75 - strength)
        got, want, unlike = (
            engine.prefill(prompt, recompute_ratio=0.3, selector=selector)[0].logits
            for selector in ("sink_attention", own, other)
        )
    assert torch.equal(got, want)
    assert not torch.equal(got, unlike)
