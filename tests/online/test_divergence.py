"""The estimate of how far a fused prompt is off: by hand, and in reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from corpus import PASSAGES, SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.online.divergence import DeviationMeter, expected_divergence, uncovered_attention


def test_attention_to_what_is_not_recomputed_is_uncovered() -> None:
    scores, positions = torch.tensor([0.1, 0.2, 0.05, 0.15]), torch.tensor([4, 5, 9, 10])
    assert uncovered_attention(scores, positions, torch.tensor([5, 9])) == pytest.approx(0.25)
    assert uncovered_attention(scores, positions, positions) == 0


def test_deviation_is_a_share_of_the_stored_norm_in_the_last_third_of_the_layers() -> None:
    meter = DeviationMeter(6)
    stored = torch.tensor([[[3.0, 4.0], [0.0, 2.0]]])
    meter.measure(3, stored + 9, stored)
    assert meter.deviation is None
    # Distances 1 and 1, norms 5 and 2.
    meter.measure(4, stored + torch.tensor([0.0, 1.0]), stored)
    meter.measure(4, stored, stored)
    assert meter.deviation == pytest.approx((1 / 5 + 1 / 2) / 2)
    meter.measure(5, stored, stored)
    assert meter.deviation == pytest.approx((1 / 5 + 1 / 2) / 4)


def test_passes_count_by_their_tokens() -> None:
    assert expected_divergence(0.5, [(0.2, 30), (0.6, 10)]) == pytest.approx(0.5 * 0.3)


@pytest.fixture
def engine(tmp_path: Path):
    options = {"preprocessing": "none", "store_misses": False, "wrap_chat_template": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        yield engine


def test_a_chunk_that_is_exact_is_expected_to_diverge_by_nothing(engine: FusedKVEngine) -> None:
    _, exact = engine.prefill(SHORT[0] + "\n\nWhat is it about, please?", recompute_ratio=0.3)
    _, off = engine.prefill(rag_prompt(SHORT[:4]), recompute_ratio=0.3)
    assert exact.expected_divergence == pytest.approx(0, abs=1e-5)
    assert off.expected_divergence is not None
    assert off.expected_divergence > 1e-3


@pytest.mark.parametrize(
    "options", [{"recompute_ratio": 0.0}, {"recompute_ratio": 1.0}, {"recompute_ratio": 0.3, "selector": "cacheblend"}]
)
def test_nothing_is_expected_where_nothing_was_seen(engine: FusedKVEngine, options: dict) -> None:
    assert engine.prefill(rag_prompt(SHORT[:4]), **options)[1].expected_divergence is None


def test_slices_expect_what_one_pass_does(engine: FusedKVEngine) -> None:
    """The tokens of a prompt that is computed piece by piece, as beside other requests, count alike."""
    prompt = rag_prompt(SHORT[:4])
    _, whole = engine.prefill(prompt, recompute_ratio=0.3)
    handle = engine.submit(prompt, max_tokens=1, recompute_ratio=0.3)
    assert handle.result().report.expected_divergence == pytest.approx(whole.expected_divergence, rel=1e-3)


@pytest.mark.real_model
def test_it_falls_as_more_is_recomputed(tmp_path: Path) -> None:
    with FusedKVEngine("smollm2-135m", kv_dir=tmp_path, preprocessing="none", store_misses=False) as engine:
        engine.build_kv_cache(PASSAGES[:5], progress=False)
        found = [engine.prefill(rag_prompt(PASSAGES[:5]), recompute_ratio=ratio)[1] for ratio in (0.1, 0.3, 0.6)]
    expected = [report.expected_divergence or 0.0 for report in found]
    assert expected == sorted(expected, reverse=True)
    assert expected[0] > 2 * expected[2] > 0
