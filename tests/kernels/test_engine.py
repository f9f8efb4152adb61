"""The whole engine on Triton's kernels, interpreted: what a GPU would run, on a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from corpus import rag_prompt
from models import tiny_model
from random_model import random_words, word_tokenizer

from fused_kv_kernels import dispatch
from fused_kv_llm import FusedKVEngine

ALWAYS = {"place_chunks", "row_attention"}
# No package has to be there that carries a tokenizer: this runs on whatever machine has the device.
CHUNKS = [random_words(40, 500, seed) for seed in (1, 2)]
SELECTORS = {"middle_layers": ALWAYS | {"token_scores"}, "cacheblend": ALWAYS | {"kv_deviation"}}


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_triton_gives_the_logits_of_torch(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Both kinds of selectors, so that every operator that the engine uses is run (interpreted: seconds each)."""
    called = mock.Mock(wraps=dispatch.triton_op)
    for operator in set().union(*SELECTORS.values()):
        monkeypatch.setattr(sys.modules[f"fused_kv_kernels.{operator}"], "triton_op", called)
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    model = tiny_model().to(device)
    options = {"kv_dtype": kv_dtype, "preprocessing": "none", "store_misses": False}
    with FusedKVEngine(model, tokenizer=word_tokenizer(500), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(CHUNKS, progress=False)
        prompt = rag_prompt(CHUNKS, random_words(20, 500, 3))
        for selector, operators in SELECTORS.items():
            monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
            want, report = engine.prefill(prompt, recompute_ratio=0.3, selector=selector)
            assert report.recomputed_tokens > 5
            assert not called.called
            monkeypatch.setenv("FUSED_KV_KERNELS", "triton")
            got, _ = engine.prefill(prompt, recompute_ratio=0.3, selector=selector)
            assert {call.args[0] for call in called.call_args_list} == operators
            called.reset_mock()
            assert torch.equal(got.selected, want.selected)
            torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
