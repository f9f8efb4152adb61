"""One prompt in several ways: what is said of each is what two separate requests show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError, RequestCancelledError
from fused_kv_llm.tuning import SideBySide, Way

PROMPT = rag_prompt(SHORT[:3], "What about the ferries?")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    folder: Path = tmp_path_factory.mktemp("ways")
    with FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32", preprocessing="none"
    ) as made:
        made.build_kv_cache(SHORT[:3], progress=False)
        yield made


def test_each_way_is_compared_with_full_prefill(engine: FusedKVEngine) -> None:
    ways = [Way("sink_attention", 0.0), Way(recompute_ratio=1.0), Way("cacheblend", 0.3)]
    full, found = SideBySide(engine, PROMPT, 8).compare(ways)
    plain = engine.generate(PROMPT, max_tokens=8, recompute_ratio=1.0)
    assert full.token_ids == plain.token_ids
    assert (full.kl, full.agreement, full.first_difference) == (0.0, 1.0, None)
    assert found[1] is full
    for way, answer in zip(ways, found, strict=True):
        report = answer.report
        assert (report.recompute_ratio, report.prefix_cache_tokens) == (way.recompute_ratio, 0)
        alone = engine.generate(
            PROMPT, max_tokens=8, selector=way.selector, recompute_ratio=way.recompute_ratio, prefix_cache=False
        )
        assert answer.token_ids == alone.token_ids
        pairs = [a == b for a, b in zip(answer.token_ids, full.token_ids, strict=False)]
        assert answer.first_difference == (None if answer.token_ids == full.token_ids else [*pairs, False].index(False))
    assert found[0].kl > 0
    assert found[0].kl == pytest.approx(_divergence(engine, full.token_ids, 0.0), rel=1e-3)


def _divergence(engine: FusedKVEngine, answer: list[int], ratio: float) -> float:
    """The same by the engine's other way in: prefill, then the answer's tokens at once."""
    rows = []
    for one in (1.0, ratio):
        fused, _ = engine.prefill(PROMPT, recompute_ratio=one, selector="sink_attention", max_tokens=len(answer) + 1)
        rows.append(torch.cat((fused.logits[None], fused.append(engine.loaded, answer[:-1]))).log_softmax(-1))
        fused.cache.release()
    return float((rows[0].exp() * (rows[0] - rows[1])).sum(-1).mean())


def test_nothing_of_earlier_requests_is_used_and_nothing_is_left(engine: FusedKVEngine) -> None:
    engine.clear_prefix_cache()
    SideBySide(engine, PROMPT, 2).compare([Way("sink_attention", 0.3)])
    assert engine.generate(PROMPT, max_tokens=2, recompute_ratio=1.0).report.prefix_cache_tokens == 0
    assert engine.generate(PROMPT, max_tokens=2, recompute_ratio=1.0).report.prefix_cache_tokens > 0
    report = SideBySide(engine, PROMPT, 1).full_prefill()
    assert (report.prefix_cache_tokens, report.reused_tokens, report.recompute_ratio) == (0, 0, 1.0)


def test_a_way_that_cannot_be_had_is_refused_before_anything_is_computed(engine: FusedKVEngine) -> None:
    both = SideBySide(engine, PROMPT, 8)
    for way in (Way("cacheblend", "adaptive"), Way("none"), Way(recompute_ratio=2.0), Way(recompute_ratio="auto")):
        with pytest.raises(ConfigError):
            both.compare([Way(recompute_ratio=0.0), way])
        assert both.tokens == 0, way


def test_a_comparison_that_is_cancelled_ends(engine: FusedKVEngine) -> None:
    both, ended = SideBySide(engine, PROMPT, 1500), threading.Event()

    def compare() -> None:
        with pytest.raises(RequestCancelledError):
            both.compare([Way(recompute_ratio=0.0)])
        ended.set()

    thread = threading.Thread(target=compare)
    thread.start()
    both.cancel()
    thread.join(10)
    assert ended.is_set()
