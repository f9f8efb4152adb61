"""Variants of chunks: KV behind other chunks, kept from live prompts and used where little of it has to be fixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine, FusionReport
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store import variant_name

_FIX = {"selector": "cache_craft", "recompute_ratio": 0.9}


def open_engine(folder: Path, model: Any = None, **options: Any) -> FusedKVEngine:
    chosen: dict[str, Any] = {"preprocessing": "none", "store_misses": False, "variants": 3, **options}
    return FusedKVEngine(model or tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **chosen)


def learn(engine: FusedKVEngine, *prompts: list[str], **options: Any) -> None:
    """Answer prompts over chunks, and keep the chunks as they are in them."""
    for chunks in prompts:
        engine.generate(rag_prompt(chunks), **{"max_tokens": 1, "recompute_ratio": 1.0, **options})
        engine.wait_for_background()


def ask(engine: FusedKVEngine, chunks: list[str], **options: Any) -> FusionReport:
    fused, report = engine.prefill(rag_prompt(chunks), **{**_FIX, **options})
    fused.cache.release()
    return report


def used(report: FusionReport) -> list[bool]:
    """Whether a variant was used, chunk by chunk."""
    return [one["variant"] != "" for one in report.variants]


def keys_of(engine: FusedKVEngine, chunks: list[str]) -> list[str]:
    return [str(engine.chunk_id(chunk)) for chunk in chunks]


def names_of(engine: FusedKVEngine, chunk: str) -> list[str]:
    assert engine.corpus.variants is not None
    return engine.corpus.variants.names(keys_of(engine, [chunk])[0])


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_variant_behind_its_own_prefix_is_full_prefill_and_recomputes_nothing(
    architecture: str, tmp_path: Path
) -> None:
    with open_engine(tmp_path, tiny_model(architecture)) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        learn(engine, SHORT[:4])
        prompt = rag_prompt(SHORT[:4])
        exact, _ = engine.prefill(prompt, recompute_ratio=1.0)
        fused, report = engine.prefill(prompt, **_FIX)
        assert report.recomputed_tokens == 0
        assert [(one["overhead"], one["recomputed_tokens"]) for one in report.variants] == [(0.0, 0)] * 4
        # The first chunk stands behind no other, and so does its plain KV.
        assert used(report) == [False, True, True, True]
        with engine.requests.planner.plan(prompt, FusionReport()) as request:
            for segment in request.segments[1:]:
                span = slice(segment.start, segment.stop)
                for got, want in ((fused.cache.keys, exact.cache.keys), (fused.cache.values, exact.cache.values)):
                    torch.testing.assert_close(got[..., span, :], want[..., span, :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("auto", 1e-4), ("int8", 0.1)])
def test_a_prompt_of_variants_only_is_full_prefill(kv_dtype: str, tolerance: float, tmp_path: Path) -> None:
    """Without words before the first chunk its plain KV is exact too, so nothing differs from full prefill."""
    prompt = "\n\n".join([*SHORT[:4], "How many?"])
    with open_engine(tmp_path, kv_dtype=kv_dtype) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        engine.generate(prompt, max_tokens=1, recompute_ratio=1.0)
        engine.wait_for_background()
        exact, _ = engine.prefill(prompt, recompute_ratio=1.0)
        fused, report = engine.prefill(prompt, **_FIX)
        assert report.recomputed_tokens == 0
        assert used(report) == [False, True, True, True]
        torch.testing.assert_close(fused.logits, exact.logits, atol=tolerance, rtol=tolerance)


def test_a_variant_is_moved_to_where_its_chunk_stands(tmp_path: Path) -> None:
    """The first layer's keys depend on token and position only, so moved ones must equal computed ones."""
    with open_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:5], progress=False)
        learn(engine, [SHORT[0], SHORT[1], SHORT[2]])
        moved = rag_prompt([SHORT[0], SHORT[4], SHORT[1], SHORT[2]])
        exact, _ = engine.prefill(moved, recompute_ratio=1.0)
        fused, report = engine.prefill(moved, **_FIX)
        assert used(report) == [False, False, True, True]
        count = report.prompt_tokens
        torch.testing.assert_close(
            fused.cache.keys[0, ..., :count, :], exact.cache.keys[0, ..., :count, :], atol=1e-4, rtol=1e-4
        )


def test_the_variant_of_the_least_overhead_is_used(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:5], progress=False)
        learn(engine, [SHORT[0], SHORT[1], SHORT[4]], [SHORT[2], SHORT[1], SHORT[4]])
        assert len(names_of(engine, SHORT[4])) == 2
        for first in (SHORT[0], SHORT[2]):
            report = ask(engine, [first, SHORT[1], SHORT[4]])
            assert report.variants[2]["variant"] == variant_name(keys_of(engine, [first, SHORT[1]]))
            assert report.variants[2]["overhead"] == 0.0
        # Of another order half is left, of no overlap nothing: plain KV needs less fixing then.
        report = ask(engine, [SHORT[3], SHORT[0], SHORT[4]])
        assert 0.0 < report.variants[2]["overhead"] < 0.5
        report = ask(engine, [SHORT[3], SHORT[4]])
        assert report.variants[1]["variant"] == ""
        assert report.variants[1]["overhead"] == 0.5
        assert report.recomputed_tokens == report.variants[1]["recomputed_tokens"] > 0


def test_what_is_recorded_is_the_attention_of_all_layers(tmp_path: Path) -> None:
    """Against transformers' own attention weights of one forward."""
    model = tiny_model()
    with open_engine(tmp_path, model) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        learn(engine, SHORT[:3])
        assert engine.corpus.variants is not None
        key, (name,) = keys_of(engine, SHORT[:3])[2], names_of(engine, SHORT[2])
        record = engine.corpus.variants.record(key, name)
        with engine.requests.planner.plan(rag_prompt(SHORT[:3]), FusionReport()) as request:
            segments = request.segments
        plain = tiny_model()
        plain.set_attn_implementation("eager")
        with torch.inference_mode():
            ids = engine.encode(rag_prompt(SHORT[:3]))
            layers = plain(torch.tensor([ids]), output_attentions=True).attentions
        weights = torch.stack([layer[0].mean(0) for layer in layers])
        spans = [slice(one.start, one.stop) for one in segments]
        inter = torch.stack([weights[:, spans[2], span].sum((1, 2)) for span in spans[:2]], 1)
        torch.testing.assert_close(record.inter, inter, atol=1e-4, rtol=1e-3)
        intra = weights[:, spans[2], spans[2]].tril(-1).sum((1, 2))
        torch.testing.assert_close(record.intra, intra, atol=1e-4, rtol=1e-3)
        by_token = sum(weights[:, spans[2], span].sum(2).mean(0) for span in spans[:2])
        torch.testing.assert_close(record.token_inter[slice(*record.covered)], by_token, atol=1e-4, rtol=1e-3)
        assert record.prefix == tuple(keys_of(engine, SHORT[:2]))
        assert record.prefix_tokens.tolist() == [one.num_tokens for one in segments[:2]]


@pytest.mark.parametrize("part", ["", "-about"])
@pytest.mark.parametrize("damage", ["altered", "gone"])
@pytest.mark.filterwarnings("ignore::fused_kv_llm.errors.FusedKVWarning")
def test_a_damaged_variant_gives_way_to_plain_kv_and_is_reported(part: str, damage: str, tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:2], progress=False)
        learn(engine, SHORT[:2])
        key, (name,) = keys_of(engine, SHORT[:2])[1], names_of(engine, SHORT[1])
    (file,) = tmp_path.rglob(f"{key}.{name}{part}.safetensors")
    if damage == "gone":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        # Near the end: what has been computed when it is noticed is thrown away.
        data[-40] ^= 0xFF
        file.write_bytes(data)
    with open_engine(tmp_path) as engine:
        generation = engine.generate(rag_prompt(SHORT[:2]), max_tokens=1, **_FIX)
        assert used(generation.report) == [False, False]
        assert generation.report.chunks_found == 2
        assert any("its plain KV was used instead" in one for one in generation.report.warnings)
        assert engine.store.contains([key]) == {key}
        engine.wait_for_background()
        # It is made again from the prompt.
        assert used(ask(engine, SHORT[:2])) == [False, True]


def test_another_tenant_or_model_has_none_of_it(tmp_path: Path) -> None:
    with open_engine(tmp_path, tenant="one") as engine:
        engine.build_kv_cache(SHORT[:2], progress=False)
        learn(engine, SHORT[:2])
        assert used(ask(engine, SHORT[:2])) == [False, True]
    for options in ({"tenant": "two"}, {"tenant": "one", "model": tiny_model(seed=1)}):
        with open_engine(tmp_path, **options) as engine:
            engine.build_kv_cache(SHORT[:2], progress=False)
            assert used(ask(engine, SHORT[:2])) == [False, False]


def test_a_chunk_has_as_many_variants_as_are_allowed(tmp_path: Path) -> None:
    with open_engine(tmp_path, variants=1) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        learn(engine, [SHORT[0], SHORT[3]], [SHORT[1], SHORT[3]])
        assert names_of(engine, SHORT[3]) == [variant_name(keys_of(engine, SHORT[1:2]))]


def test_nothing_is_kept_unless_it_is_asked_for(tmp_path: Path) -> None:
    with open_engine(tmp_path, variants=0) as engine:
        engine.build_kv_cache(SHORT[:2], progress=False)
        learn(engine, SHORT[:2])
        assert engine.store.sidecars.sizes("variant-") == {}
        assert used(ask(engine, SHORT[:2])) == [False, False]


def test_served_requests_share_pages_of_variants(tmp_path: Path) -> None:
    with open_engine(tmp_path, share_chunk_kv="always") as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        learn(engine, SHORT[:3])
        prompt = rag_prompt(SHORT[:3])
        alone = engine.generate(prompt, max_tokens=6, **_FIX)
        handles = [engine.submit(prompt, max_tokens=6, **_FIX) for _ in range(3)]
        for handle in handles:
            assert handle.result().token_ids == alone.token_ids


def test_preprocessing_leaves_variants_behind_its_contexts(tmp_path: Path) -> None:
    with open_engine(tmp_path, preprocessing="similar") as engine:
        near = {SHORT[3]: SHORT[:3], **{text: [] for text in SHORT[:3]}}
        engine.build_kv_cache(SHORT[:4], neighbours=near, variant_contexts=1, preprocess="wait", progress=False)
        assert names_of(engine, SHORT[3]) == [variant_name(keys_of(engine, SHORT[:3]))]
        # The context's own chunks are kept as they are in it, too.
        assert [len(names_of(engine, text)) for text in SHORT[:3]] == [0, 1, 1]
        # Nothing is added to a variant: it has a context already.
        report = ask(engine, SHORT[:4])
        assert used(report) == [False, True, True, True]
        assert report.sidecar_bytes_loaded == {}


def test_preprocessing_keeps_no_variants_unless_it_is_asked_to(tmp_path: Path) -> None:
    near = {SHORT[3]: SHORT[:3], **{text: [] for text in SHORT[:3]}}
    with open_engine(tmp_path, preprocessing="similar") as engine:
        engine.build_kv_cache(SHORT[:4], neighbours=near, preprocess="wait", progress=False)
        assert names_of(engine, SHORT[3]) == []
    for options in ({"variants": 0, "preprocessing": "similar"}, {"preprocessing": "none"}):
        with open_engine(tmp_path, **options) as engine, pytest.raises(ConfigError, match="variant_contexts=1"):
            engine.build_kv_cache(SHORT[:4], variant_contexts=1, progress=False)


def test_question_attention_can_work_on_variants(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        learn(engine, SHORT[:4])
        prompt = rag_prompt(SHORT[:4])
        exact, _ = engine.prefill(prompt, recompute_ratio=1.0)
        want, errors = exact.logits.clone(), []
        for selector, takes in (("sink_attention", False), ("sink_attention_variants", True)):
            fused, report = engine.prefill(prompt, selector=selector, recompute_ratio=0.15)
            assert report.recomputed_tokens == int(0.15 * (report.reused_tokens + report.recomputed_tokens))
            assert sum(one["variant"] != "" for one in report.variants) == (3 if takes else 0)
            errors.append(float((fused.logits - want).abs().max()))
        assert errors[1] < 0.7 * errors[0]
