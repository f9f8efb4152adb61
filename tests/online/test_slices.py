"""A prompt that is computed in slices has the KV, the logits and the report of one pass."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from corpus import SHORT, rag_prompt
from hypothesis import given
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model
from torch import Tensor

from fused_kv_llm import FusedKVEngine, FusionReport
from fused_kv_llm.model import RaggedPart, forward_ragged
from fused_kv_llm.online import FusedPrompt, Fusion, Recipe
from fused_kv_llm.online.slices import first_slice
from fused_kv_llm.selectors import resolve_selector


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 30))
def test_a_chunk_is_not_cut(runs: list[tuple[int, int]], max_rows: int) -> None:
    # Each run is a chunk of its own, or fresh text.
    kind = torch.tensor(
        [-1 if fresh < 0 else number for number, (fresh, length) in enumerate(runs) for _ in range(length)]
    )
    left, sizes = kind, list[int]()
    while left.shape[0]:
        count = first_slice(left, max_rows)
        sizes.append(count)
        assert 0 < count <= left.shape[0]
        assert count <= max_rows or (len(set(left[:count].tolist())) == 1 and left[0] >= 0)
        assert count == left.shape[0] or left[count] != left[count - 1] or left[count] < 0
        left = left[count:]
    assert sum(sizes) == kind.shape[0]


@pytest.fixture(scope="module", params=["similar", "none"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FusedKVEngine:
    folder: Path = tmp_path_factory.mktemp("slices")
    made = FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, preprocessing=request.param, dtype="float32"
    )
    made.build_kv_cache(SHORT[:6], preprocess="wait", progress=False)
    return made


def fused(
    engine: FusedKVEngine, recipe: Recipe, max_rows: int | None
) -> tuple[FusedPrompt, list[Tensor], FusionReport]:
    """Fuse a prompt in slices beside a second request, whose part of the first pass breaks and is left out."""
    report, slices = FusionReport(), list[Tensor]()
    request = engine.requests.planner.plan(rag_prompt(SHORT[:6]), report)
    whole_prompt = Fusion(engine.requests.context, request, recipe, request.num_tokens, report)
    with torch.inference_mode(), closing(whole_prompt) as fusion:
        fusion.begin()
        fusion.select()
        prompt = None
        while prompt is None:
            part = fusion.next_slice(max_rows)
            assert fusion.next_slice(max_rows) is part
            slices.append(part.forward_pass.rows)
            report.seconds["fuse"] = 1.0
            (logits,) = forward_ragged(engine.loaded, [part])
            prompt = fusion.computed(logits)
    return prompt, slices, report


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("name", ["sink_attention", "fusionrag", "qcfuse", "random"])
def test_slices_equal_the_whole(engine: FusedKVEngine, name: str, ratio: float) -> None:
    recipe = Recipe(resolve_selector(name), ratio)
    whole, (rows,), report = fused(engine, recipe, None)
    for max_rows in (7, 24, 90):
        sliced, slices, of_slices = fused(engine, recipe, max_rows)
        assert len(slices) > 1 or len(rows) <= max_rows
        assert torch.equal(torch.cat(slices), rows)
        torch.testing.assert_close(sliced.logits, whole.logits, atol=1e-4, rtol=1e-4)
        length = whole.cache.length
        for a, b in ((sliced.cache.keys, whole.cache.keys), (sliced.cache.values, whole.cache.values)):
            torch.testing.assert_close(a[..., :length, :], b[..., :length, :], atol=1e-4, rtol=1e-4)
        plain, other = report.to_dict(), of_slices.to_dict()
        for one in (plain, other):
            del one["seconds"], one["timeline"]
            # From which tier depends on how often they were read before.
            one["bytes_loaded"] = sum(one["bytes_loaded"].values())
        expected = plain.pop("expected_divergence")
        assert other.pop("expected_divergence") == (None if expected is None else pytest.approx(expected, rel=1e-4))
        assert plain == other
        sliced.cache.release()
    whole.cache.release()


@pytest.mark.parametrize("name", ["cacheblend", "kvshare"])
def test_a_selector_that_sees_all_rows_gets_them_in_one_slice(engine: FusedKVEngine, name: str) -> None:
    prompt, slices, report = fused(engine, Recipe(resolve_selector(name), 0.3), 24)
    assert len(slices) == 1
    assert report.recomputed_tokens > 0
    prompt.cache.release()


def test_a_slice_that_is_run_again_corrects_its_chunks_once(engine: FusedKVEngine) -> None:
    recipe = Recipe(resolve_selector("sink_attention"), 0.3)
    whole, _, _ = fused(engine, recipe, None)
    report = FusionReport()
    request = engine.requests.planner.plan(rag_prompt(SHORT[:6]), report)
    whole_prompt = Fusion(engine.requests.context, request, recipe, request.num_tokens, report)
    with torch.inference_mode(), closing(whole_prompt) as fusion:
        fusion.begin()
        fusion.select()
        part: RaggedPart = fusion.next_slice()
        forward_ragged(engine.loaded, [part])
        (logits,) = forward_ragged(engine.loaded, [fusion.next_slice()])
    torch.testing.assert_close(logits, whole.logits, atol=1e-5, rtol=1e-5)
    whole.cache.release()
