"""Adaptive recomputation: rounds until the answer's first tokens move no more."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from hypothesis import given
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model
from torch import Tensor

from fused_kv_llm import FusedKVEngine, FusionReport
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import ForwardPass, LoadedModel, forward_ragged, forward_rows
from fused_kv_llm.online import Adaptive, FusedPrompt, Fusion, MovingAverage, Recipe, fuse, fused_recipe, round_ratios
from fused_kv_llm.online.adaptive import expected_after
from fused_kv_llm.online.draft import DRAFT_TOKENS, LARGEST, Draft
from fused_kv_llm.selectors import Probe, View, budget_tokens, resolve_selector

NEVER, AT_ONCE = 1e-12, 1e9
PROMPT = rag_prompt(SHORT[:6])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> FusedKVEngine:
    folder: Path = tmp_path_factory.mktemp("adaptive")
    made = FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32")
    made.build_kv_cache(SHORT[:6], preprocess="wait", progress=False)
    return made


def recipe_of(name: str, target: float, most: float = 0.5) -> Recipe:
    return Recipe(resolve_selector(name), round_ratios(most)[0], adaptive=Adaptive(target, most))


def fused(
    engine: FusedKVEngine, recipe: Recipe, room: int = 8, max_rows: int | None = None
) -> tuple[FusedPrompt, list[list[int]], FusionReport, Tensor]:
    """Fuse a prompt; return it, the rows of every forward, the report, and the positions of its chunks' tokens."""
    report, passes = FusionReport(), list[list[int]]()
    request = engine.requests.planner.plan(PROMPT, report)
    fusion = Fusion(engine.requests.context, request, recipe, request.num_tokens + room, report)
    with torch.inference_mode(), closing(fusion):
        fusion.begin()
        fusion.select()
        prompt = None
        while prompt is None:
            part = fusion.next_slice(max_rows)
            passes.append(part.forward_pass.rows.tolist())
            (logits,) = forward_ragged(engine.loaded, [part])
            prompt = fusion.computed(logits)
    return prompt, passes, report, request.chunk_positions


@given(st.floats(0.01, 0.99))
def test_the_rounds_ascend_to_the_most(most: float) -> None:
    ratios = round_ratios(most)
    assert ratios[-1] == most
    assert list(ratios) == sorted(set(ratios))


def test_a_draft_is_followed_and_compared_by_hand() -> None:
    draft = Draft(100, 3)
    assert draft.next_rows() == ([], [])
    first, second, third = torch.tensor([1.0, 3.0, 0.0]), torch.tensor([0.0, 0.0, 2.0]), torch.zeros(3)
    draft.take(first)
    assert draft.next_rows() == ([100], [1]), "the likeliest token stands behind the prompt"
    draft.take(second)
    assert draft.next_rows() == ([101], [2])
    draft.take(third)
    assert draft.next_rows() == ([], [])
    assert draft.end_round() is None
    moved = torch.tensor([3.0, 1.0, 0.0])
    draft.take(moved)
    assert draft.next_rows() == ([100, 101], [1, 2]), "the draft stays, and is known now"
    draft.take(torch.stack((second, third)))
    now, before = moved.softmax(0), first.softmax(0)
    by_hand = float((now * (now / before).log()).sum()) / 3
    assert draft.end_round() == pytest.approx(by_hand, rel=1e-5)
    entropies = [-(one.softmax(0) * one.log_softmax(0)).sum() for one in (moved, second, third)]
    assert draft.entropy == pytest.approx(float(sum(entropies)) / 3, rel=1e-5)


@given(st.floats(0, 0.9), st.floats(1e-6, 5), st.floats(1e-3, 9))
def test_open_answers_that_move_are_expected_to_be_far_off(ratio: float, moved: float, entropy: float) -> None:
    expected = expected_after(ratio, moved, entropy)
    assert 0 < expected < expected_after(ratio, 2 * moved, entropy)
    assert expected < expected_after(ratio, moved, 2 * entropy)
    assert expected > expected_after(ratio + 0.1, moved, entropy)
    assert expected_after(ratio, 0.0, entropy) == 0
    assert expected_after(ratio, LARGEST, entropy) > expected_after(ratio, 5, entropy)


@pytest.mark.parametrize("name", ["sink_attention", "fusionrag", "boundary"])
def test_it_goes_on_to_the_most_or_stops_after_two_rounds(engine: FusedKVEngine, name: str) -> None:
    for target, ratio in ((NEVER, 0.5), (AT_ONCE, 0.05)):
        prompt, passes, report, chunk = fused(engine, recipe_of(name, target))
        assert report.recomputed_tokens == budget_tokens(ratio, chunk.shape[0])
        assert report.recompute_ratio == ratio
        assert report.expected_divergence is not None
        assert report.expected_divergence >= 0
        once = engine.prefill(PROMPT, selector=name, recompute_ratio=ratio)[0]
        assert torch.equal(prompt.selected, once.selected), "a ranking is spent from its top"
        rows = torch.tensor([row for rows in passes for row in rows])
        of_chunks = rows[torch.isin(rows, chunk)]
        assert of_chunks.unique().shape == of_chunks.shape, "nothing of a chunk is computed twice"
        drafted = [rows for rows in passes if rows[0] >= prompt.cache.length]
        rounds = 1 + len(round_ratios(0.5)) if ratio == 0.5 else 2
        assert len(drafted) == rounds * (DRAFT_TOKENS - 1)
        prompt.cache.release()
        once.cache.release()


def test_rounds_are_forwards_over_what_the_rounds_before_have_left(engine: FusedKVEngine) -> None:
    """Written out with plain forwards, for a rule that transfers nothing."""
    prompt, _, _, chunk = fused(engine, recipe_of("boundary", AT_ONCE))
    first, _ = engine.prefill(PROMPT, selector="boundary", recompute_ratio=0.0)
    ids, length = torch.tensor(first.kept.ids), first.cache.length
    fresh = torch.arange(length)
    fresh = fresh[~torch.isin(fresh, chunk) & (fresh >= int(chunk[0]))]
    more = prompt.selected[~torch.isin(prompt.selected, first.selected)]
    rows = torch.cat((more, fresh)).sort().values
    with torch.inference_mode():
        logits = forward_rows(engine.loaded, ids[rows][None], rows, first.cache, ForwardPass(rows, length))
    torch.testing.assert_close(prompt.logits, logits[-1], atol=1e-4, rtol=1e-4)
    for got, want in ((prompt.cache.keys, first.cache.keys), (prompt.cache.values, first.cache.values)):
        torch.testing.assert_close(got[..., :length, :], want[..., :length, :], atol=1e-4, rtol=1e-4)


def test_what_was_recomputed_is_not_corrected_by_later_rounds(engine: FusedKVEngine) -> None:
    first, _ = engine.prefill(PROMPT, recompute_ratio=0.05)
    prompt, *_ = fused(engine, recipe_of("sink_attention", NEVER))
    assert first.selected.shape[0] > 1
    for got, want in ((prompt.cache.keys, first.cache.keys), (prompt.cache.values, first.cache.values)):
        torch.testing.assert_close(got[..., first.selected, :], want[..., first.selected, :], atol=1e-5, rtol=1e-5)


def test_slices_and_little_room_change_nothing_but_the_draft(engine: FusedKVEngine) -> None:
    recipe = recipe_of("sink_attention", AT_ONCE)
    whole, *_ = fused(engine, recipe)
    sliced, passes, *_ = fused(engine, recipe, room=0, max_rows=9)
    assert all(rows[0] < sliced.cache.length for rows in passes), "no room for a draft: the first token alone"
    torch.testing.assert_close(sliced.logits, whole.logits, atol=1e-4, rtol=1e-4)


def test_alone_a_known_draft_is_one_forward(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, drafts = recipe_of("sink_attention", NEVER), list[int]()
    batched, _, want, _ = fused(engine, recipe)

    def counting(loaded: LoadedModel, ids: Tensor, rows: Tensor, *rest: Any) -> Tensor:
        if int(rows[0]) >= batched.cache.length:
            drafts.append(rows.shape[0])
        return forward_rows(loaded, ids, rows, *rest)

    monkeypatch.setattr("fused_kv_llm.online.fusion.forward_rows", counting)
    report = FusionReport()
    request = engine.requests.planner.plan(PROMPT, report)
    prompt = fuse(engine.requests.context, request, recipe, request.num_tokens + 8, report)
    drafted = DRAFT_TOKENS - 1
    assert drafts == [1] * drafted + [drafted] * len(round_ratios(0.5))
    torch.testing.assert_close(prompt.logits, batched.logits, atol=1e-4, rtol=1e-4)
    assert report.expected_divergence == pytest.approx(want.expected_divergence, rel=1e-2)


def test_a_draft_that_is_left_alone_is_gone_on_with_beside_others(engine: FusedKVEngine) -> None:
    recipe, report = recipe_of("sink_attention", NEVER), FusionReport()
    want, _, wanted, _ = fused(engine, recipe)
    request = engine.requests.planner.plan(PROMPT, report)
    fusion = Fusion(engine.requests.context, request, recipe, request.num_tokens + 8, report)
    with torch.inference_mode(), closing(fusion):
        fusion.begin()
        prompt, turns = None, 0
        while prompt is None:
            turns += 1
            if turns % 2:
                prompt = fusion.advance(pause_at_s=0.0)
            else:
                prompt = fusion.computed(forward_ragged(engine.loaded, [fusion.next_slice()])[0])
    torch.testing.assert_close(prompt.logits, want.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(prompt.selected, want.selected)
    assert report.expected_divergence == pytest.approx(wanted.expected_divergence, rel=1e-2)


def test_answers_are_those_of_the_final_kv_alone_and_beside_others(engine: FusedKVEngine) -> None:
    alone = engine.generate(PROMPT, recompute_ratio="adaptive", max_tokens=8)
    prompt, report = engine.prefill(PROMPT, recompute_ratio="adaptive", max_tokens=8)
    ids = [int(prompt.logits.argmax())]
    while len(ids) < len(alone.token_ids):
        ids.append(int(prompt.append(engine.loaded, [ids[-1]])[-1].argmax()))
    assert list(alone.token_ids) == ids
    handles = [engine.submit(PROMPT, recompute_ratio="adaptive", max_tokens=8, prefix_cache=False) for _ in range(3)]
    for handle in handles:
        found = handle.result()
        assert found.token_ids == alone.token_ids
        assert found.report.recomputed_tokens == report.recomputed_tokens


def test_its_kv_is_kept_under_a_recipe_of_its_own(engine: FusedKVEngine) -> None:
    loaded, recipe = engine.loaded, recipe_of("sink_attention", 0.05)
    plain = Recipe(recipe.selector, recipe.ratio)
    assert fused_recipe(recipe, loaded, None) != fused_recipe(plain, loaded, None)
    assert fused_recipe(recipe, loaded, None) != fused_recipe(recipe_of("sink_attention", 0.1), loaded, None)


def test_one_token_is_judged_like_a_long_answer(engine: FusedKVEngine) -> None:
    found = [engine.generate(PROMPT, recompute_ratio="adaptive", max_tokens=n, prefix_cache=False) for n in (1, 32)]
    movements = [made.report.expected_divergence for made in found]
    assert movements[0] == pytest.approx(movements[1], rel=1e-3)
    assert found[0].report.recomputed_tokens == found[1].report.recomputed_tokens


@dataclass(frozen=True)
class Spread:
    """Takes every so-manieth token: what a smaller budget takes is no part of it."""

    name: str = "spread"

    def view(self, num_layers: int) -> View:
        return View()

    def select(self, probe: Probe, budget: int) -> Tensor:
        return probe.positions[torch.linspace(0, probe.positions.shape[0] - 1, budget).long()]


def test_a_rule_without_a_ranking_does_not_exceed_the_most(engine: FusedKVEngine) -> None:
    recipe = Recipe(Spread(), 0.05, adaptive=Adaptive(NEVER, 0.5))
    prompt, _, report, chunk = fused(engine, recipe)
    assert report.recomputed_tokens <= budget_tokens(0.5, chunk.shape[0])
    prompt.cache.release()


def test_where_nothing_can_be_added_nothing_is_drafted(engine: FusedKVEngine) -> None:
    prompt, passes, report, _ = fused(engine, recipe_of("full_reuse", NEVER))
    assert len(passes) == 1
    assert (report.recompute_ratio, report.recomputed_tokens, report.expected_divergence) == (0.0, 0, None)
    prompt.cache.release()


def test_impossible_tokens_are_left_out_and_new_ones_move_without_bounds() -> None:
    for second, want in (([0.0, 0.0, -torch.inf], 0.0), ([0.0, 0.0, 0.0], LARGEST)):
        draft = Draft(10, 1)
        draft.take(torch.tensor([0.0, 0.0, -torch.inf]))
        draft.end_round()
        draft.take(torch.tensor(second))
        assert draft.end_round() == want


def test_rounds_teach_nothing_of_the_time_for_a_row(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[float] = []
    monkeypatch.setattr(MovingAverage, "add", lambda self, value: taught.append(value))
    engine.generate(PROMPT, recompute_ratio="adaptive", max_tokens=2, prefix_cache=False)
    assert taught == []
    engine.generate(PROMPT, recompute_ratio=0.1, max_tokens=2, prefix_cache=False)
    assert taught


@pytest.mark.parametrize(
    "options", [{"adaptive_cap": 1.0}, {"adaptive_cap": 0}, {"adaptive_target": 0}, {"adaptive_target": "much"}]
)
def test_options_out_of_range_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options)  # type: ignore[arg-type]


def test_a_rule_that_selects_while_it_recomputes_is_refused(engine: FusedKVEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cacheblend"):
        engine.prefill(PROMPT, selector="cacheblend", recompute_ratio="adaptive")
    with pytest.raises(ConfigError, match="give recompute_ratio a number"):
        FusedKVEngine(
            tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, selector="cacheblend",
            recompute_ratio="adaptive",
        )  # fmt: skip
