"""Passes that select by their first layers, against the same thing written out plainly."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.online import Request
from fused_kv_llm.online.first_layers import FirstLayersPass
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import (
    CacheCraft,
    CacheCraftOnline,
    FirstLayersView,
    KVDeviation,
    Probe,
    budget_tokens,
    focused_chunks,
)
from fused_kv_llm.selectors.kv_deviation import CACHEBLEND_RELEASED

from .reference_fusion import finish, project, stitched_kv

RATIO = 0.3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("first_layers")
    model = tiny_model(num_hidden_layers=5)
    with FusedKVEngine(
        model, tokenizer=smollm2_tokenizer(), kv_dir=folder, preprocessing="none", store_misses=False
    ) as engine:
        engine.build_kv_cache(SHORT[:5], progress=False)
        yield engine


def plan(engine: FusedKVEngine) -> Request:
    return engine.requests.planner.plan(rag_prompt(SHORT[:5]), FusionReport())


def dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, scale: float) -> Any:
    """Return weights ``[Hq, R, N]`` and output ``[1, Hq, R, D]`` with a mask over true positions."""
    groups = q.shape[1] // keys.shape[1]
    wide_k, wide_v = keys[0].repeat_interleave(groups, 0), values[0].repeat_interleave(groups, 0)
    scores = scale * q[0] @ wide_k.transpose(1, 2)
    hidden = torch.arange(keys.shape[2])[None, :] > rows[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights, (weights @ wide_v)[None]


@torch.inference_mode()
def narrowed(engine: FusedKVEngine, selector: KVDeviation, budget: int) -> tuple[list[int], torch.Tensor]:
    """CacheBlend in one pass, rows really dropped: positions left, and the last row's logits."""
    request, decoder = plan(engine), engine.model.model
    stored = stitched_kv(engine, request)
    view = selector.view(engine.loaded.geometry.num_layers)
    rows = torch.arange(request.prefix_tokens, request.num_tokens)
    hidden = decoder.embed_tokens(torch.tensor([request.ids])[:, rows])
    received = torch.zeros(request.num_tokens)
    for index, layer in enumerate(decoder.layers):
        q, k, v = project(layer, hidden, decoder.rotary_emb(hidden, rows[None]))
        before = (stored.keys[index][:, :, rows].clone(), stored.values[index][:, :, rows].clone())
        stored.keys[index][:, :, rows], stored.values[index][:, :, rows] = k, v
        weights, out = dense(q, stored.keys[index], stored.values[index], rows, layer.self_attn.scaling)
        hidden = finish(layer, hidden, out)
        if index in view.attention:
            received += weights.mean(0).sum(0)
        if index in view.deviation:
            gap = ((k - before[0]) ** 2).sum((0, 1, 3)) + ((v - before[1]) ** 2).sum((0, 1, 3))
            score = gap.sqrt() * (received[rows] if selector.by_attention else 1.0)
            keep = math.ceil(view.keep[view.deviation.index(index)] * budget)
            ranked = sorted((i for i in range(len(rows)) if request.kind[rows[i]] >= 0), key=lambda i: -float(score[i]))
            left = [i for i in range(len(rows)) if i in set(ranked[:keep]) or request.kind[rows[i]] < 0]
            rows, hidden = rows[left], hidden[:, left]
    logits = engine.model.lm_head(decoder.norm(hidden))[0, -1]
    return [int(row) for row in rows if request.kind[row] >= 0], logits


@pytest.mark.parametrize(
    "selector",
    [
        KVDeviation("cacheblend"),
        CACHEBLEND_RELEASED,
        KVDeviation("kvshare", layers=(1,), keep=(1.0,), by_attention=True),
        KVDeviation("late", layers=(2, 4), keep=(2.0, 1.0)),
    ],
    ids=lambda s: s.name,
)
def test_narrowing_equals_a_pass_that_really_drops_rows(engine: FusedKVEngine, selector: KVDeviation) -> None:
    fused, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=RATIO, selector=selector)
    budget = budget_tokens(RATIO, plan(engine).chunk_positions.shape[0])
    selected, logits = narrowed(engine, selector, budget)
    assert fused.selected.tolist() == selected
    assert report.recomputed_tokens == budget
    torch.testing.assert_close(fused.logits, logits, atol=1e-4, rtol=1e-4)


class Watching:
    """Looks at the attention in layers 0 and 2, and keeps what it was told."""

    name = "watching"

    def view(self, num_layers: int) -> FirstLayersView:
        return FirstLayersView(attention=(0, 2))

    def select(self, probe: Probe, budget: int) -> torch.Tensor:
        self.seen = probe
        return probe.positions[:budget]


@torch.inference_mode()
def test_attention_sums_equal_dense_attention(engine: FusedKVEngine) -> None:
    request, decoder, layers = plan(engine), engine.model.model, (0, 2)
    dense_kv, chunk, selector = stitched_kv(engine, request), request.chunk_positions, Watching()
    engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=RATIO, selector=selector)
    got = selector.seen
    rows = torch.arange(request.prefix_tokens, request.num_tokens)
    hidden = decoder.embed_tokens(torch.tensor([request.ids])[:, rows])
    weights = torch.zeros(request.num_tokens, request.num_tokens)
    for index, layer in enumerate(decoder.layers):
        q, k, v = project(layer, hidden, decoder.rotary_emb(hidden, rows[None]))
        dense_kv.keys[index][:, :, rows], dense_kv.values[index][:, :, rows] = k, v
        now, out = dense(q, dense_kv.keys[index], dense_kv.values[index], rows, layer.self_attn.scaling)
        weights[rows] += now.mean(0) / len(layers) if index in layers else 0.0
        hidden = finish(layer, hidden, out)
    kind = request.kind
    for number, position in enumerate(chunk.tolist()):
        mine = kind == kind[position]
        assert got.received is not None
        assert got.received_within is not None
        assert got.given is not None
        assert float(got.received[number]) == pytest.approx(float(weights[:, position].sum()), abs=1e-4)
        assert float(got.received_within[number]) == pytest.approx(float(weights[mine, position].sum()), abs=1e-4)
        want = [float(weights[position, kind == other].sum()) for other in range(5)]
        assert got.given[number].tolist() == pytest.approx(want, abs=1e-5)


def settled(history: list[frozenset[int]], window: int) -> bool:
    """Cache-Craft's algorithm 1, line 11."""
    return 0 < window < len(history) and all(one == history[-1] for one in history[-window:])


@torch.inference_mode()
def with_attention(
    engine: FusedKVEngine, selected: list[int], window: int, looked: int = 2
) -> tuple[torch.Tensor, int | None]:
    """All rows through so many layers, the selected ones as long as the question looks at their chunk.

    Returns
    -------
    tuple
        The last row's logits, and the layer after which rows out of focus left.
    """
    request, decoder = plan(engine), engine.model.model
    stored = stitched_kv(engine, request)
    question = request.question_rows()[1]
    rows = torch.arange(request.prefix_tokens, request.num_tokens)
    if not looked:
        rows = torch.tensor([row for row in rows.tolist() if request.kind[row] < 0 or row in selected])
    hidden = decoder.embed_tokens(torch.tensor([request.ids])[:, rows])
    attention, history, dropped_at = torch.zeros(5), [], None
    for index, layer in enumerate(decoder.layers):
        q, k, v = project(layer, hidden, decoder.rotary_emb(hidden, rows[None]))
        stored.keys[index][:, :, rows], stored.values[index][:, :, rows] = k, v
        weights, out = dense(q, stored.keys[index], stored.values[index], rows, layer.self_attn.scaling)
        hidden = finish(layer, hidden, out)
        mass = weights[:, -question:].mean((0, 1))
        attention += torch.stack([mass[request.kind == chunk].sum() for chunk in range(5)])
        history.append(focused_chunks(attention))
        kind, left = request.kind[rows].tolist(), None
        if index == looked - 1:
            left = [i for i, row in enumerate(rows.tolist()) if kind[i] < 0 or row in selected]
        elif looked - 1 < index < len(decoder.layers) - 1 and dropped_at is None and settled(history, window):
            dropped_at = index
            left = [i for i in range(len(rows)) if kind[i] in {-1, *history[-1]}]
            assert len(left) < len(rows)
        if left is not None:
            rows, hidden = rows[left], hidden[:, left]
    return engine.model.lm_head(decoder.norm(hidden))[0, -1], dropped_at


@pytest.mark.parametrize(
    ("selector", "window"),
    [("prefill_h2o", 0), *((replace(CacheCraftOnline(), focus_window=window), window) for window in (1, 2))],
)
def test_rows_that_are_not_selected_or_out_of_focus_leave(engine: FusedKVEngine, selector: Any, window: int) -> None:
    fused, _ = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=RATIO, selector=selector)
    want, dropped_at = with_attention(engine, fused.selected.tolist(), window)
    assert (dropped_at is not None) == bool(window)
    torch.testing.assert_close(fused.logits, want, atol=1e-4, rtol=1e-4)


def test_cache_craft_computes_selected_rows_only_and_then_those_in_focus(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows by layer: the fresh and the selected ones from the first layer on, and fewer once the focus is stable."""
    rows: list[int] = []
    attend = FirstLayersPass.attend

    def counted(self: FirstLayersPass, layer_idx: int, q: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(q.shape[2])
        return attend(self, layer_idx, q, *args)

    monkeypatch.setattr(FirstLayersPass, "attend", counted)
    fused, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.9, selector=CacheCraft(focus_window=1))
    want, dropped_at = with_attention(engine, fused.selected.tolist(), 1, looked=0)
    assert dropped_at is not None
    # Without records: half of every chunk but the prompt's first.
    kinds = plan(engine).kind[fused.selected]
    assert sorted(set(kinds.tolist())) == [1, 2, 3, 4]
    begun = report.fresh_tokens + fused.selected.shape[0]
    assert rows[: dropped_at + 1] == [begun] * (dropped_at + 1)
    assert all(count < begun for count in rows[dropped_at + 1 :])
    assert len(rows) > dropped_at + 1, "layers are left that it saves"
    torch.testing.assert_close(fused.logits, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("selector", ["cacheblend", "kvshare", "prefill_h2o", "cache_craft_online"])
def test_rows_that_were_dropped_are_not_computed(
    engine: FusedKVEngine, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each layer computes: everything where the view looks, then what is left of it."""
    rows: list[int] = []
    attend = FirstLayersPass.attend

    def counted(self: FirstLayersPass, layer_idx: int, q: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(q.shape[2])
        return attend(self, layer_idx, q, *args)

    monkeypatch.setattr(FirstLayersPass, "attend", counted)
    fused, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=RATIO, selector=selector)
    everything = report.prompt_tokens - report.prefix_tokens
    left = report.fresh_tokens + fused.selected.shape[0]
    assert rows[:2] == [everything] * 2
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] <= left < everything
    if selector != "cache_craft_online":
        assert rows[-1] == left
