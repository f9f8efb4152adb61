"""The fused pass and the probe against the same thing written out plainly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_kernels.reference import token_scores_reference
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.online.probe import QuestionProbe
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import QueryAttention, SinkAttention, View, transfer_strength

from .reference_fusion import finish, project, recompute_rows, stitched, stitched_kv


@pytest.fixture
def engine(tmp_path: Path):
    with FusedKVEngine(
        tiny_model(), preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, store_misses=False
    ) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        yield engine


@pytest.mark.parametrize(
    "selector",
    [
        "full_reuse",
        "random",
        "boundary",
        "fusionrag",
        "prophetkv",
        "middle_layers",
        "all_layers",
        "sink_attention",
    ],
)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.6])
def test_fused_pass_equals_plain_recomputation(engine: FusedKVEngine, selector: str, ratio: float) -> None:
    prompt = rag_prompt(SHORT[:6])
    fused, report = engine.prefill(prompt, recompute_ratio=ratio, selector=selector)
    request = engine.requests.planner.plan(prompt, FusionReport())
    stored = stitched_kv(engine, request)
    rows = request.rows(fused.selected)
    transfer = transfer_strength(SinkAttention(), shifted=False) if selector == "sink_attention" and ratio else 0.0
    logits, keys, values = recompute_rows(
        engine.model, request.ids, rows, stored.keys, stored.values, request.kind, transfer
    )
    request.close()
    torch.testing.assert_close(fused.logits, logits, atol=1e-4, rtol=1e-4)
    count = report.prompt_tokens
    torch.testing.assert_close(fused.cache.keys[..., :count, :], keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.cache.values[..., :count, :], values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("full_context", [False, True])
@pytest.mark.parametrize("layers", [(2,), (0, 1, 2), (1,)])
def test_probe_scores_equal_plain_attention(engine: FusedKVEngine, layers: tuple[int, ...], full_context: bool) -> None:
    request = engine.requests.planner.plan(rag_prompt(SHORT[:6]), FusionReport())
    kv = stitched(engine, request)
    with torch.inference_mode():
        got = QuestionProbe(engine.loaded, request, kv, View(layers, full_context)).scores().mean(0)
        want = _plain_scores(engine, request, layers, full_context)
    request.close()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def _plain_scores(engine: FusedKVEngine, request, layers, full_context) -> torch.Tensor:
    decoder, stored = engine.model.model, stitched_kv(engine, request)
    rows, question = request.question_rows()
    request.close()
    chunk = request.chunk_positions
    available = torch.cat((torch.arange(request.prefix_tokens), chunk, rows)).sort().values
    visible = available if full_context else torch.cat((torch.arange(request.prefix_tokens), rows))
    hidden = decoder.embed_tokens(torch.tensor([request.ids])[:, rows])
    rotary = decoder.rotary_emb(hidden, rows[None])
    total = torch.zeros(available.shape[0])
    for index, layer in enumerate(decoder.layers):
        q, k, v = project(layer, hidden, rotary)
        stored.keys[index][:, :, rows], stored.values[index][:, :, rows] = k, v
        scale = layer.self_attn.scaling
        if index in layers:
            keys = stored.keys[index, 0][:, available]
            at = torch.searchsorted(available, rows[-question:])
            total += token_scores_reference(q[0, :, -question:], keys, at, scale)
        # A dense mask over true positions, independent of the probe's compressed indices.
        mask = visible[None, :] <= rows[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(
            q,
            stored.keys[index][:, :, visible],
            stored.values[index][:, :, visible],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        hidden = finish(layer, hidden, attended)
    return total[torch.searchsorted(available, chunk)] / len(layers)


def test_the_question_is_the_text_after_the_last_chunk(engine: FusedKVEngine) -> None:
    request = engine.requests.planner.plan(rag_prompt(SHORT[:6]), FusionReport())
    rows, question = request.question_rows()
    request.close()
    assert question == rows.shape[0] >= 16
    assert engine.tokenizer.decode([request.ids[i] for i in rows.tolist()]).lstrip().startswith("Question: How many")


def test_a_question_before_the_chunks_is_seen(engine: FusedKVEngine) -> None:
    prompt = f"Question: How many passengers can the Aldebaran carry?\n\n{SHORT[0]}\n\n{SHORT[1]}"
    request = engine.requests.planner.plan(prompt, FusionReport())
    rows, question = request.question_rows()
    request.close()
    assert question < rows.shape[0]
    assert "How many passengers" in engine.tokenizer.decode([request.ids[i] for i in rows.tolist()])
    fused, _ = engine.prefill(prompt, recompute_ratio=0.3)
    assert fused.selected.shape[0] > 0


def test_a_selector_of_ones_own(engine: FusedKVEngine) -> None:
    mine = QueryAttention("mine", layers=(0, 2), full_context=True)
    _, report = engine.prefill(rag_prompt(SHORT[:6]), selector=mine, recompute_ratio=0.2)
    assert report.selector == "mine"
    assert report.recomputed_tokens > 0


def test_appending_tokens_equals_prefilling_them(engine: FusedKVEngine) -> None:
    prompt = rag_prompt(SHORT[:3])
    answer = engine.token_ids(" The answer is nine")
    fused, _ = engine.prefill(prompt, recompute_ratio=1.0, max_tokens=8)
    got = fused.append(engine.loaded, answer)
    step, _ = engine.prefill(prompt, recompute_ratio=1.0, max_tokens=8)
    one_by_one = torch.cat([step.append(engine.loaded, [token]) for token in answer])
    torch.testing.assert_close(got, one_by_one, atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        ids = torch.tensor([engine.encode(prompt) + answer])
        want = engine.model(ids).logits[0, -len(answer) :]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
