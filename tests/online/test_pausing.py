"""A prompt that is left between layers and gone on with has the KV, logits and report of one run, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_kernels import why_not_native
from fused_kv_llm import FusedKVEngine, FusionReport
from fused_kv_llm.model import forward_ragged, may_pause
from fused_kv_llm.online import Adaptive, FusedPrompt, Fusion, Recipe, round_ratios
from fused_kv_llm.online.draft import DRAFT_TOKENS
from fused_kv_llm.selectors import resolve_selector
from fused_kv_llm.serving.served_request import ServedRequest

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")
LAYERS = 5
AT_ONCE = 0.0
NEVER = float("inf")


def made(folder: Path, dtype: torch.dtype = torch.bfloat16) -> FusedKVEngine:
    sizes = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = FusedKVEngine(tiny_model(**sizes).to(dtype), tokenizer=smollm2_tokenizer(), kv_dir=folder)
    made.build_kv_cache(SHORT[:6], preprocess="wait", progress=False)
    return made


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> FusedKVEngine:
    return made(tmp_path_factory.mktemp("pausing"))


def fused(
    engine: FusedKVEngine,
    recipe: Recipe,
    pause_at_s: float,
    between: Callable[[int], None] = lambda times: None,
    room: int = 0,
) -> tuple[FusedPrompt, int, FusionReport]:
    """Fuse a prompt that is left whenever it may; return how often it was advanced."""
    report, times = FusionReport(), 0
    request = engine.requests.planner.plan(rag_prompt(SHORT[:6]), report)
    fusion = Fusion(engine.requests.context, request, recipe, request.num_tokens + room, report)
    prompt = None
    with torch.inference_mode(), closing(fusion):
        fusion.begin()
        while prompt is None:
            prompt, times = fusion.advance(pause_at_s), times + 1
            between(times)
    return prompt, times, report


def assert_equal(one: FusedPrompt, other: FusedPrompt) -> None:
    length = one.cache.length
    assert length == other.cache.length
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.selected, other.selected)
    assert torch.equal(one.cache.keys[..., :length, :], other.cache.keys[..., :length, :])
    assert torch.equal(one.cache.values[..., :length, :], other.cache.values[..., :length, :])


@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("name", ["sink_attention", "fusionrag", "qcfuse", "random"])
def test_layer_by_layer_is_the_whole(engine: FusedKVEngine, name: str, ratio: float) -> None:
    recipe = Recipe(resolve_selector(name), ratio)
    whole, times, report = fused(engine, recipe, NEVER)
    assert times == 1
    paused, times, of_paused = fused(engine, recipe, AT_ONCE)
    # It is left behind every layer, once more behind the last, before the head.
    assert times > LAYERS
    assert_equal(paused, whole)
    plain, other = report.to_dict(), of_paused.to_dict()
    assert plain["seconds"].keys() == other["seconds"].keys()
    for one in (plain, other):
        del one["seconds"], one["timeline"]
        # From which tier depends on how often they were read before.
        one["bytes_loaded"] = sum(one["bytes_loaded"].values())
    assert plain == other
    for prompt in (whole, paused):
        prompt.cache.release()


ROUNDS = Recipe(resolve_selector("sink_attention"), 0.05, adaptive=Adaptive(1e-12, 0.3))


def test_rounds_and_their_draft_are_gone_on_with_layer_by_layer(engine: FusedKVEngine) -> None:
    whole, times, report = fused(engine, ROUNDS, NEVER, room=8)
    # A step for each pass; drafts are computed with what stands before them.
    assert times == 1 + len(round_ratios(0.3))
    paused, times, of_paused = fused(engine, ROUNDS, AT_ONCE, room=8)
    assert times > LAYERS * (1 + len(round_ratios(0.3)))
    assert_equal(paused, whole)
    assert of_paused.expected_divergence == report.expected_divergence
    for prompt in (whole, paused):
        prompt.cache.release()


def test_a_draft_that_is_left_between_layers_is_gone_on_with_beside_others(engine: FusedKVEngine) -> None:
    whole, _, _ = fused(engine, ROUNDS, NEVER, room=8)
    request = engine.requests.planner.plan(rag_prompt(SHORT[:6]), FusionReport())
    fusion = Fusion(engine.requests.context, request, ROUNDS, request.num_tokens + 8, FusionReport())
    with torch.inference_mode(), closing(fusion):
        fusion.begin()
        prompt, left = None, 0
        while prompt is None:
            prompt = fusion.advance(AT_ONCE)
            part = None if prompt is not None else fusion.next_slice()
            if part is not None and part.position >= whole.cache.length:
                left += 1
                assert part.ids.shape[0] == 1
                prompt = fusion.computed(forward_ragged(engine.loaded, [part])[0])
    assert left >= DRAFT_TOKENS
    assert torch.equal(prompt.selected, whole.selected)
    torch.testing.assert_close(prompt.logits, whole.logits, atol=0.1, rtol=0.1)
    for one in (whole, prompt):
        one.cache.release()


def test_seconds_of_all_its_parts_are_counted(engine: FusedKVEngine) -> None:
    recipe, seen = Recipe(resolve_selector("sink_attention"), 0.2), list[float]()
    report = FusionReport()
    request = engine.requests.planner.plan(rag_prompt(SHORT[:6]), report)
    fusion = Fusion(engine.requests.context, request, recipe, request.num_tokens, report)
    with torch.inference_mode(), closing(fusion):
        fusion.begin()
        while (prompt := fusion.advance(AT_ONCE)) is None:
            seen.append(report.seconds.get("fuse", 0.0))
    assert seen == sorted(seen)
    assert len(set(seen)) >= LAYERS
    prompt.cache.release()


@pytest.mark.parametrize("name", ["cacheblend", "kvshare"])
def test_a_selector_that_drops_rows_on_its_way_is_not_left(engine: FusedKVEngine, name: str) -> None:
    recipe = Recipe(resolve_selector(name), 0.3)
    whole, _, _ = fused(engine, recipe, NEVER)
    prompt, times, _ = fused(engine, recipe, AT_ONCE)
    assert times == 1
    assert_equal(prompt, whole)
    for one in (whole, prompt):
        one.cache.release()


def test_a_layer_that_somebody_looks_at_meanwhile_is_computed_once_more_with_all_others(tmp_path: Path) -> None:
    engine = made(tmp_path)
    recipe, seen = Recipe(resolve_selector("fusionrag"), 0.2), list[torch.Tensor]()
    whole, _, _ = fused(engine, recipe, NEVER)
    layer = engine.model.get_decoder().layers[1]

    def look(times: int) -> None:
        if times == LAYERS + 3:
            layer.register_forward_hook(lambda module, given, result: seen.append(result))

    prompt, times, _ = fused(engine, recipe, AT_ONCE, look)
    # From then on it is not left any more, and the hook sees what the layer gives, once.
    assert times == LAYERS + 4
    assert len(seen) == 1
    assert not may_pause(engine.model.get_decoder())
    assert_equal(prompt, whole)
    for one in (whole, prompt):
        one.cache.release()


def test_a_model_without_fast_layers_is_not_left(tmp_path: Path) -> None:
    engine = made(tmp_path, torch.float32)
    prompt, times, _ = fused(engine, Recipe(resolve_selector("sink_attention"), 0.2), AT_ONCE)
    assert times <= 2
    prompt.cache.release()


def test_an_answer_goes_on_while_a_prompt_is_computed(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    events, part, advance = list[str](), ServedRequest.part, ServedRequest.advance
    began_s, times = 0.0, list[tuple[float, float]]()

    def noted_part(self: ServedRequest, max_rows: int | None) -> Any:
        nonlocal began_s
        events.append("token")
        began_s = time.perf_counter()
        return part(self, max_rows)

    def noted_advance(self: ServedRequest, pause_at_s: float, max_rows: int | None) -> FusedPrompt | None:
        events.append("alone" if max_rows is None else "layers")
        now_s = time.perf_counter()
        times.append((pause_at_s - now_s, now_s - began_s))
        # A layer of this model takes no time.
        return advance(self, pause_at_s if max_rows is None else AT_ONCE, max_rows)

    asked = rag_prompt(SHORT[:6])
    expected = [engine.generate(asked, max_tokens=tokens).token_ids for tokens in (200, 30)]
    monkeypatch.setattr(ServedRequest, "part", noted_part)
    monkeypatch.setattr(ServedRequest, "advance", noted_advance)
    running = engine.submit(asked, max_tokens=200)
    running.wait_for_first()
    begins = engine.submit(asked, max_tokens=30)
    assert [handle.result().token_ids for handle in (running, begins)] == expected
    layers = [number for number, event in enumerate(events) if event == "layers"]
    assert len(layers) > LAYERS
    # The answer gets a token between any two of them, and they have a small multiple of the time that it took.
    assert all(events[number - 1] == "token" for number in layers)
    of_layers = [
        one for one, event in zip(times, (e for e in events if e != "token"), strict=True) if event == "layers"
    ]
    assert all(left_s <= 4 * token_s + 0.01 for left_s, token_s in of_layers)
