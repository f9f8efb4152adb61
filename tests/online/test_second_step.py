"""A selector with two steps: what each of them chooses and computes, beside a plain computation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from torch import Tensor

from fused_kv_kernels.reference import row_attention_reference, token_scores_reference
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.online import Request
from fused_kv_llm.online.context import Recipe
from fused_kv_llm.online.selection import describe_chunks
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import Anchors, SinkAttention, View

from .reference_fusion import finish, project, recompute_rows, stitched_kv

PROMPT = rag_prompt(SHORT[:5])
TWO = SinkAttention(name="two", anchors=Anchors("kvzip", 0.2), first_share=0.4)
ONE = replace(TWO, first_share=1.0)
RATIO = 0.3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    model = tiny_model(num_hidden_layers=5)
    with FusedKVEngine(
        model, tokenizer=smollm2_tokenizer(), kv_dir=tmp_path_factory.mktemp("two"), selector=TWO,
        preprocessing="none", store_misses=False,
    ) as engine:  # fmt: skip
        engine.build_kv_cache(SHORT[:5], progress=False)
        yield engine


def plan(engine: FusedKVEngine) -> Request:
    return engine.requests.planner.plan(PROMPT, FusionReport())


def chosen_first(engine: FusedKVEngine, budget: int) -> Tensor:
    """Return what the anchors choose of a budget."""
    view = ONE.view(5)
    _, by_layer = engine.requests.attention_by_layer(PROMPT, View(view.plain_layers, anchors=ONE.anchors))
    known = replace(describe_chunks(plan(engine), Recipe(ONE, RATIO)), scores=by_layer.mean(0))
    return ONE.select(known, budget)


def question_scores(engine: FusedKVEngine, request: Request, keys: Tensor, values: Tensor, layers: range) -> Tensor:
    """Return the question's attention to the chunks ``[C]``, averaged over layers; it sees header and chunks."""
    decoder, keys, values = engine.model.model, keys.clone(), values.clone()
    rows, question = request.question_rows()
    seen = torch.cat((torch.arange(request.prefix_tokens), request.chunk_positions, rows)).sort().values
    at = torch.searchsorted(seen, rows)
    hidden, found = decoder.embed_tokens(torch.tensor([request.ids])[:, rows]), []
    for index, layer in enumerate(decoder.layers[: layers.stop]):
        q, k, v = project(layer, hidden, decoder.rotary_emb(hidden, rows[None]))
        keys[index][:, :, rows], values[index][:, :, rows] = k, v
        k, v, scaling = keys[index][:, :, seen], values[index][:, :, seen], layer.self_attn.scaling
        if index in layers:
            mass = token_scores_reference(q[0, :, -question:], k[0], at[-question:], scaling)
            found.append(mass[torch.isin(seen, request.chunk_positions)])
        hidden = finish(layer, hidden, row_attention_reference(q, k, v, at, scaling))
    return torch.stack(found).mean(0)


@torch.inference_mode()
def test_both_steps_equal_a_plain_computation(engine: FusedKVEngine) -> None:
    request, stored = plan(engine), stitched_kv(engine, plan(engine))
    chunk, early = request.chunk_positions, TWO.view(5).plain_layers
    budget = int(RATIO * chunk.shape[0])
    first = chosen_first(engine, math.ceil(TWO.first_share * budget))
    rows = request.rows(first)
    rows = rows[rows <= chunk[-1]]
    _, keys, values = recompute_rows(
        engine.model, request.ids, rows, stored.keys, stored.values, request.kind, TWO.transfer
    )
    scores = question_scores(engine, request, keys, values, range(early[0], early[-1] + 1))
    known = replace(describe_chunks(request, Recipe(TWO, RATIO)), scores=scores, chosen=first)
    selected = TWO.second_step().select(known, budget)
    assert set(first.tolist()) < set(selected.tolist())
    left = request.rows(selected)
    logits, keys, values = recompute_rows(engine.model, request.ids, left[~torch.isin(left, rows)], keys, values)
    fused, report = engine.prefill(PROMPT, recompute_ratio=RATIO)
    assert fused.selected.tolist() == selected.tolist()
    assert report.recomputed_tokens == budget
    torch.testing.assert_close(fused.logits, logits, atol=1e-4, rtol=1e-4)
    count = request.num_tokens
    torch.testing.assert_close(fused.cache.keys[..., :count, :], keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.cache.values[..., :count, :], values, atol=1e-4, rtol=1e-4)


def test_no_more_is_read_before_recomputation_than_by_anchors_alone(engine: FusedKVEngine) -> None:
    reports = []
    for rule in (TWO, ONE):
        engine.store.drop_memory()
        reports.append(engine.prefill(PROMPT, recompute_ratio=RATIO, selector=rule)[1])
    two, one = reports
    assert two.selection_bytes == one.selection_bytes
    assert two.bytes_loaded == one.bytes_loaded
    assert two.selection_bytes < 0.4 * sum(two.bytes_loaded.values())


@pytest.mark.parametrize("budget_ratio", [0.0, 1e-6, 1.0])
def test_budgets_that_leave_nothing_to_a_second_step(engine: FusedKVEngine, budget_ratio: float) -> None:
    fused, _ = engine.prefill(PROMPT, recompute_ratio=budget_ratio)
    want, _ = engine.prefill(PROMPT, recompute_ratio=budget_ratio, selector=ONE)
    assert fused.selected.tolist() == want.selected.tolist()
    torch.testing.assert_close(fused.logits, want.logits)


def test_an_adaptive_request_has_one_step_of_anchors_and_rounds_then(engine: FusedKVEngine) -> None:
    fused, report = engine.prefill(PROMPT, recompute_ratio="adaptive")
    want, of_one = engine.prefill(PROMPT, recompute_ratio="adaptive", selector=ONE)
    assert fused.selected.tolist() == want.selected.tolist()
    assert report.recompute_ratio == of_one.recompute_ratio


def test_a_served_answer_is_that_of_a_prompt_alone(engine: FusedKVEngine) -> None:
    """In slices, beside others, and with a pause between the steps."""
    alone = engine.generate(PROMPT, max_tokens=6, recompute_ratio=RATIO)
    prompts = [PROMPT, rag_prompt(SHORT[1:4]), rag_prompt(SHORT[2:5])]
    wanted = [engine.generate(prompt, max_tokens=6, recompute_ratio=RATIO).token_ids for prompt in prompts]
    assert wanted[0] == alone.token_ids
    handles = [engine.submit(prompt, max_tokens=6, recompute_ratio=RATIO) for prompt in prompts]
    assert [handle.result().token_ids for handle in handles] == wanted


@pytest.mark.parametrize("share", [0.0, 1.5, -0.1])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="first_share"):
        SinkAttention(first_share=share)
