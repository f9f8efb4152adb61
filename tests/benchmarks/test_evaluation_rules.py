"""Rules with deviation transfer and without it: the same choice, other KV."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from corpus import SHORT
from evaluation.questions import Question
from evaluation.rules import all_rules, base_name, prefill, rule_of
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.selectors import SinkAttention, transfer_strength

PROMPT = Question("q", "How many?", ("many",), tuple(SHORT[:4])).prompt("plain")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    """An engine with four stored chunks."""
    folder = tmp_path_factory.mktemp("kv")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, preprocessing="none") as opened:
        opened.build_kv_cache(SHORT[:4], progress=False)
        yield opened


def test_every_rule_is_there_with_transfer_and_without() -> None:
    rules = all_rules()
    assert {"sink_attention", "sink_attention-transfer", "cacheblend", "cacheblend+transfer"} <= set(rules)
    assert {"full_reuse", "prefix_cache", "sink_attention_variants"}.isdisjoint(rules)
    for name in {base_name(rule) for rule in rules}:
        both = [rule_of(rule) for rule in rules if base_name(rule) == name]
        for shifted in (True, False):
            strengths = [transfer_strength(rule, shifted=shifted) for rule in both]
            assert sorted(strengths) == [0.0, transfer_strength(SinkAttention(), shifted=shifted)]


@pytest.mark.parametrize("name", sorted({base_name(rule) for rule in all_rules()}))
def test_transfer_changes_the_kv_and_not_the_choice(engine: FusedKVEngine, name: str) -> None:
    results = []
    for rule in (one for one in all_rules() if base_name(one) == name):
        fused, report, ttft_s = prefill(engine, PROMPT, selector=rule, recompute_ratio=0.2, seed=3)
        results.append((fused.selected.clone(), fused.logits.clone(), report.selection_bytes))
        fused.cache.release()
        assert report.selector == rule
        assert ttft_s >= report.seconds.get("probe", 0.0)
    (chosen, logits, looked_at), (same, other, equally) = results
    assert chosen.tolist() == same.tolist()
    assert looked_at == equally
    assert not torch.allclose(logits, other, atol=1e-6)


@pytest.mark.parametrize("name", ["sink_attention+transfer", "cacheblend-transfer"])
def test_what_a_rule_has_is_not_given_to_it_again(name: str) -> None:
    with pytest.raises(ConfigError, match="transfer"):
        rule_of(name)
