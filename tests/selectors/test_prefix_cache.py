"""The baseline of every paper: only exact prefixes are reused, so answers are full prefill's at another cost."""

from __future__ import annotations

from pathlib import Path

import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine


def make_engine(folder: Path, **options: object) -> FusedKVEngine:
    options = {"preprocessing": "none", "store_misses": False, "dtype": "float32", **options}
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)  # type: ignore[arg-type]


def test_only_what_stood_behind_the_same_tokens_is_reused(tmp_path: Path) -> None:
    first, turned = rag_prompt(SHORT[:3]), rag_prompt([SHORT[1], SHORT[0], SHORT[2]])
    longer = rag_prompt([*SHORT[:2], SHORT[3]])
    with make_engine(tmp_path, selector="prefix_cache", prefix_cache_bytes=2**28) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        cold = engine.generate(first, max_tokens=6)
        assert cold.report.recompute_ratio == 1.0
        assert cold.report.selector == "prefix_cache"
        assert cold.report.prefix_cache_tokens == 0
        assert not cold.report.bytes_loaded, "chunks' stored KV was computed elsewhere"
        ids = engine.encode(first)

        def shared(prompt: str) -> int:
            same = (a == b for a, b in zip(ids, engine.encode(prompt), strict=False))
            return next(at for at, one in enumerate(same) if not one) - len(engine.renderer.header_ids)

        warm, other = engine.generate(longer, max_tokens=6), engine.generate(turned, max_tokens=6)
        assert warm.report.prefix_cache_tokens == shared(longer) > len(engine.token_ids(SHORT[0]))
        # The very same chunks in another order share no more than the words before the first.
        assert other.report.prefix_cache_tokens == shared(turned) < 40
        assert other.report.reused_tokens == 0
        answers = [one.token_ids for one in (cold, warm, other)]
    with make_engine(tmp_path / "full", prefix_cache_bytes=0) as engine:
        full = [engine.generate(prompt, max_tokens=6, recompute_ratio=1.0) for prompt in (first, longer, turned)]
        assert answers == [one.token_ids for one in full]


def test_a_call_can_choose_it_and_other_calls_keep_their_ratio(tmp_path: Path) -> None:
    prompt = rag_prompt(SHORT[:3])
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        exact, _ = engine.prefill(prompt, recompute_ratio=1.0)
        fused, report = engine.prefill(prompt, recompute_ratio=0.2, selector="prefix_cache")
        assert report.recompute_ratio == 1.0
        torch.testing.assert_close(fused.logits, exact.logits)
        assert engine.prefill(prompt)[1].recompute_ratio == 0.15
    with make_engine(tmp_path, selector="prefix_cache") as engine:
        assert engine.prefill(prompt)[1].recompute_ratio == 1.0
        assert engine.prefill(prompt, selector="boundary")[1].recompute_ratio == 0.15
