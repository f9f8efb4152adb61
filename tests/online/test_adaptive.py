"""Adaptive recomputation: rounds until the answer's first tokens are expected to be near full prefill's."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from math import log
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
from fused_kv_llm.model import LoadedModel, forward_ragged, forward_rows
from fused_kv_llm.online import (
    Adaptive,
    FusedPrompt,
    Fusion,
    MovingAverage,
    Recipe,
    fuse,
    fused_recipe,
    fusion,
    round_ratios,
)
from fused_kv_llm.online.adaptive import Rounds, expected_after
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
    assert all(ratio <= 0.8 * most for ratio in ratios[:-1])


def test_the_rounds_of_some_caps() -> None:
    assert round_ratios(0.5) == (0.05, 0.1, 0.2, 0.3, 0.5)
    assert round_ratios(0.21) == (0.05, 0.1, 0.21)
    assert round_ratios(0.95) == (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.95)


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


def test_the_entropy_is_that_of_the_more_open_round() -> None:
    draft, open_, certain = Draft(100, 1), torch.zeros(3), torch.tensor([9.0, 0.0, 0.0])
    for logits, entropy in ((open_, log(3)), (certain, log(3)), (certain, 0.0)):
        draft.take(logits)
        draft.end_round()
        assert draft.entropy == pytest.approx(entropy, abs=0.01)


def test_a_draft_ends_where_the_answer_does() -> None:
    draft, word, end = Draft(100, 5, frozenset({2})), torch.tensor([0.0, 3.0, 0.0]), torch.tensor([0.0, 0.0, 3.0])
    draft.take(word)
    draft.take(end)
    assert draft.next_rows() == ([], []), "the end is the second token, and nothing comes behind it"
    assert draft.end_round() is None
    draft.take(word)
    assert draft.next_rows() == ([100], [1])
    draft.take(end)
    assert draft.next_rows() == ([], [])
    assert draft.end_round() == 0.0
    silent = Draft(100, 5, frozenset({1}))
    silent.take(word)
    assert silent.next_rows() == ([], [])


def test_nothing_is_drafted_behind_the_end_of_an_answer(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, real = list[int](), Draft.take

    def noted(draft: Draft, logits: torch.Tensor) -> None:
        computed.append(logits.reshape(-1, logits.shape[-1]).shape[0])
        real(draft, logits)

    monkeypatch.setattr(Draft, "take", noted)
    fused, _ = engine.prefill(PROMPT, recompute_ratio="adaptive", max_tokens=16)
    fused.cache.release()
    assert sum(computed) > DRAFT_TOKENS
    drafted, computed[:] = [*computed], []
    every = range(engine.loaded.model.config.vocab_size)
    monkeypatch.setattr(fusion, "end_token_ids", lambda loaded: frozenset(every))
    fused, report = engine.prefill(PROMPT, recompute_ratio="adaptive", max_tokens=16)
    fused.cache.release()
    assert set(computed) == {1}
    assert len(computed) < len(drafted)
    assert report.expected_divergence is not None


@given(st.floats(0, 0.9), st.floats(1e-6, 5), st.floats(1e-3, 9))
def test_open_answers_that_move_are_expected_to_be_far_off(ratio: float, moved: float, entropy: float) -> None:
    expected = expected_after(ratio, moved, entropy)
    assert expected < expected_after(ratio, 2 * moved, entropy)
    assert expected <= expected_after(ratio, moved, 2 * entropy)
    assert expected >= expected_after(ratio + 0.1, moved, entropy)
    assert expected_after(ratio, 0.0, entropy) == 0
    assert expected_after(ratio, moved, 0.0) == pytest.approx(moved / 10)


def test_the_expectation_by_hand() -> None:
    assert expected_after(0.15, 0.02, 1.5) == pytest.approx(0.1 * 2.71828**-0.42 * 0.02**0.45 * 1.5**0.66, rel=1e-4)


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
        of_chunks = [rows for rows in passes if rows[0] < prompt.cache.length]
        last = torch.tensor(of_chunks[-1])
        assert torch.equal(last[torch.isin(last, chunk)], prompt.selected), "all of them see all of them"
        drafted = [rows for rows in passes if rows[0] >= prompt.cache.length]
        rounds = 1 + len(round_ratios(0.5)) if ratio == 0.5 else 2
        assert len(drafted) == rounds * (DRAFT_TOKENS - 1)
        prompt.cache.release()
        once.cache.release()


@pytest.mark.parametrize("target", [AT_ONCE, NEVER])
def test_rounds_leave_what_one_pass_leaves(engine: FusedKVEngine, target: float) -> None:
    """Of a rule that transfers nothing; with transfer, every round corrects a little more."""
    prompt, _, report, _ = fused(engine, recipe_of("boundary", target))
    once, _ = engine.prefill(PROMPT, selector="boundary", recompute_ratio=report.recompute_ratio)
    length = once.cache.length
    torch.testing.assert_close(prompt.logits, once.logits, atol=1e-4, rtol=1e-4)
    for got, want in ((prompt.cache.keys, once.cache.keys), (prompt.cache.values, once.cache.values)):
        torch.testing.assert_close(got[..., :length, :], want[..., :length, :], atol=1e-4, rtol=1e-4)


@dataclass(frozen=True)
class Ranking:
    """Takes the first tokens."""

    name: str = "ranking"

    def view(self, num_layers: int) -> View:
        return View()

    def select(self, probe: Probe, budget: int) -> Tensor:
        return probe.positions[:budget]


def test_it_stops_at_the_first_round_that_is_expected_to_be_near_enough() -> None:
    """Logits that move less and less, by hand."""
    logits = [torch.tensor([1.0, 1.0 + 2.0**-step, 0.0]) for step in range(5)]
    known = Probe(torch.arange(100), torch.zeros(100, dtype=torch.int64), torch.arange(100))

    def expected(number: int) -> float:
        before, now = (one.log_softmax(0) for one in logits[number - 1 : number + 1])
        moved = float((now.exp() * (now - before)).sum())
        entropy = max(-float((one.exp() * one).sum()) for one in (before, now))
        return expected_after((0.0, *round_ratios(0.5))[number], moved, entropy)

    target = (expected(2) + expected(3)) / 2
    assert expected(1) > expected(2) > target > expected(3)
    rounds = Rounds(Adaptive(target, 0.5), Ranking(), known, Draft(100, 1))
    went_on = []
    for number, one in enumerate(logits[:4]):
        went_on.append(rounds.take(one))
        assert torch.equal(rounds.logits, one)
        if number:
            assert rounds.expected == pytest.approx(expected(number), rel=1e-4)
    assert went_on == [True, True, True, False]
    assert (rounds.ratio, rounds.selected.tolist()) == (0.2, list(range(20)))


def test_a_certain_answer_that_became_another_one_is_not_near() -> None:
    rounds = Rounds(Adaptive(0.01, 0.5), Ranking(), Probe(*[torch.arange(100)] * 3), Draft(100, 1))
    one, other = torch.tensor([30.0, 0.0, 0.0]), torch.tensor([0.0, 30.0, 0.0])
    assert rounds.take(one)
    assert rounds.take(other), "no entropy, and a large movement"
    assert not rounds.take(other), "it stays"


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
        assert 0 < draft.entropy < 2


def test_a_prompt_that_needs_no_round_says_so(engine: FusedKVEngine) -> None:
    engine.generate(PROMPT, recompute_ratio="adaptive", max_tokens=2)
    known = engine.generate(PROMPT, recompute_ratio="adaptive", max_tokens=2).report
    plain = engine.generate("No chunk is in this prompt.", recompute_ratio="adaptive", max_tokens=2).report
    for report in (known, plain):
        assert (report.recompute_ratio, report.recomputed_tokens, report.expected_divergence) == (0.0, 0, None)


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
