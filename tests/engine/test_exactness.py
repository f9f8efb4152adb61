"""The promises that come before all others: ratio 1 is full prefill, an unmoved chunk is an exact prefix hit.

Every architecture with every rotary type, float32, against a plain transformers forward of the same ids.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import PASSAGES, SHORT, rag_prompt
from models import ARCHITECTURES, ROPES, smollm2_tokenizer, tiny_model
from transformers import DynamicCache

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.selectors import SELECTORS

# Phi-3 knows no other rotary types than the default one and LongRoPE.
PAIRS = [(a, r) for a in ARCHITECTURES for r in ROPES if a != "phi3" or r == "default"]


def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Return a plain SDPA forward's logits ``[len(ids), vocabulary]``."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    with torch.inference_mode():
        return plain(torch.tensor([ids])).logits[0].float()


def make_engine(folder: Path, model: Any, **options: Any) -> FusedKVEngine:
    return FusedKVEngine(
        model, preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=folder, store_misses=False, **options
    )


@pytest.mark.parametrize(("architecture", "rope"), PAIRS)
def test_ratio_one_is_full_prefill(architecture: str, rope: str, tmp_path: Path) -> None:
    with make_engine(tmp_path, tiny_model(architecture, rope)) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        prompt = rag_prompt(SHORT[:6])
        fused, report = engine.prefill(prompt, recompute_ratio=1.0, max_tokens=4)
        assert report.chunks_found == 6
        assert report.recomputed_tokens > 150
        want = plain_logits(engine.model, engine.encode(prompt))[-1]
        torch.testing.assert_close(fused.logits, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("architecture", "rope"), PAIRS)
def test_a_chunk_where_it_was_prefilled_is_exact_at_ratio_zero(architecture: str, rope: str, tmp_path: Path) -> None:
    with make_engine(tmp_path, tiny_model(architecture, rope)) as engine:
        engine.build_kv_cache(SHORT[:1], progress=False)
        prompt = SHORT[0] + "\n\nHow many?"
        fused, report = engine.prefill(prompt, recompute_ratio=0.0)
        assert report.reused_tokens > 20
        assert report.recomputed_tokens == 0
        want = plain_logits(engine.model, engine.encode(prompt))[-1]
        torch.testing.assert_close(fused.logits, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("architecture", "rope"), PAIRS)
def test_a_moved_chunk_keeps_its_layer_zero_exactly(architecture: str, rope: str, tmp_path: Path) -> None:
    """Keys of the first layer depend on token and position only, so re-rotation must reproduce them."""
    with make_engine(tmp_path, tiny_model(architecture, rope)) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        prompt = rag_prompt(SHORT[:4])
        reused, report = engine.prefill(prompt, recompute_ratio=0.0)
        exact, _ = engine.prefill(prompt, recompute_ratio=1.0)
        assert report.reused_tokens > 100
        count = report.prompt_tokens
        for got, want in ((reused.cache.keys, exact.cache.keys), (reused.cache.values, exact.cache.values)):
            torch.testing.assert_close(got[0, ..., :count, :], want[0, ..., :count, :], atol=1e-4, rtol=1e-4)
        assert not torch.allclose(
            reused.cache.values[2, ..., :count, :], exact.cache.values[2, ..., :count, :], atol=1e-4
        )


class _Mixture(DynamicCache):
    """The KV that a fused pass left behind, stored and fresh; the KV of the rows computed here must be among it."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        super().__init__()
        self.parts, self.rows = (keys, values), rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for part, fresh in zip(self.parts, (key_states, value_states), strict=True):
            torch.testing.assert_close(part[layer_idx][:, :, self.rows], fresh, atol=1e-4, rtol=1e-4)
        return self.parts[0][layer_idx], self.parts[1][layer_idx]


def dense_logits(model: Any, ids: list[int], rows: torch.Tensor, fused: Any) -> torch.Tensor:
    """Return the last row's logits of transformers' own forward of `rows`, over a dense mask of true positions."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("sdpa")
    mask = torch.arange(len(ids))[None, :] <= rows[:, None]
    mixture = _Mixture(*(part[..., : len(ids), :].clone() for part in (fused.cache.keys, fused.cache.values)), rows)
    with torch.inference_mode():
        found = plain(
            torch.tensor(ids)[None, rows],
            attention_mask=mask[None, None],
            position_ids=rows[None],
            past_key_values=mixture,
        )
    return found.logits[0, -1]


@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_every_selector_obeys_causality_and_budget(selector: str, tmp_path: Path) -> None:
    """Recomputed rows equal a dense computation over the same mixture of stored and fresh KV."""
    with make_engine(tmp_path, tiny_model("qwen3")) as engine:
        engine.build_kv_cache(SHORT[:5], progress=False)
        prompt = rag_prompt(SHORT[:5])
        fused, report = engine.prefill(prompt, recompute_ratio=0.2, selector=selector)
        reusable = report.reused_tokens + report.recomputed_tokens
        fixed = {"full_reuse": 0, "prefix_cache": reusable}
        assert report.recomputed_tokens == fixed.get(selector, int(0.2 * reusable))
        assert fused.selected.tolist() == sorted(set(fused.selected.tolist()))
        total = report.prefix_tokens + reusable + report.fresh_tokens
        ids = engine.encode(prompt)
        assert total == report.prompt_tokens == len(ids)
        assert report.trace is not None
        states = torch.from_numpy(report.trace.states())
        rows = torch.isin(states, torch.tensor([2, 3])).nonzero()[:, 0]
        assert rows.shape[0] == report.recomputed_tokens + report.fresh_tokens
        torch.testing.assert_close(fused.logits, dense_logits(engine.model, ids, rows, fused), atol=1e-4, rtol=1e-4)
        # Deviation transfer changes stored KV, and rows that narrowing drops keep their fresh KV up to there.
        if not selector.startswith("sink_attention") and selector != "cacheblend":
            reused, _ = engine.prefill(prompt, recompute_ratio=0.0)
            kept = (states == 1).nonzero()[:, 0]
            assert torch.equal(fused.cache.values[-1][:, :, kept], reused.cache.values[-1][:, :, kept])


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_the_same_request_twice_is_the_same_answer(options: dict[str, Any], tmp_path: Path) -> None:
    with make_engine(tmp_path, tiny_model()) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        prompt = rag_prompt(SHORT[:3])
        first = engine.generate(prompt, max_tokens=12, **options)
        second = engine.generate(prompt, max_tokens=12, **options)
        assert first.token_ids == second.token_ids


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_answers_at_ratio_one_equal_transformers(architecture: str, tmp_path: Path) -> None:
    with make_engine(tmp_path, tiny_model(architecture)) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        prompt = rag_prompt(SHORT[:4])
        ids = engine.encode(prompt)
        plain = copy.deepcopy(engine.model)
        plain.set_attn_implementation("sdpa")
        with torch.inference_mode():
            want = plain.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()
        assert engine.generate(prompt, max_tokens=16, recompute_ratio=1.0).token_ids == want


def test_the_model_still_generates_by_itself(tmp_path: Path) -> None:
    """Attaching the seam leaves a user's own forward as it was, batches with padding included."""
    model = tiny_model()
    plain = copy.deepcopy(model)
    ids = torch.randint(3, 40000, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.inference_mode():
        want = plain(ids, attention_mask=mask).logits
        with make_engine(tmp_path, model) as engine:
            got = engine.model(ids, attention_mask=mask).logits
    torch.testing.assert_close(got, want)


@pytest.mark.real_model
def test_smollm2_ratio_one_equals_plain(tmp_path: Path) -> None:
    with FusedKVEngine(
        "smollm2-135m", preprocessing="none", kv_dir=tmp_path, dtype="float32", store_misses=False
    ) as engine:
        engine.build_kv_cache(PASSAGES[:3], progress=False)
        prompt = rag_prompt(PASSAGES[:3])
        fused, report = engine.prefill(prompt, recompute_ratio=1.0, max_tokens=2)
        ids = engine.encode(prompt)
        torch.testing.assert_close(fused.logits, plain_logits(engine.model, ids)[-1], atol=1e-4, rtol=1e-4)
        assert report.chunks_found == 3
        plain = copy.deepcopy(engine.model)
        plain.set_attn_implementation("sdpa")
        with torch.inference_mode():
            want = plain.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        assert engine.generate(prompt, max_tokens=12, recompute_ratio=1.0).token_ids == want
        single = PASSAGES[0] + "\n\nHow many passengers?"
        fused, _ = engine.prefill(single, recompute_ratio=0.0)
        torch.testing.assert_close(
            fused.logits, plain_logits(engine.model, engine.encode(single))[-1], atol=1e-4, rtol=1e-4
        )
