"""The order of retrieved chunks: it begins as an earlier prompt did, and the exact prefix is as long as that."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import SHORT, rag_prompt
from hypothesis import given
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.engine.chunk_order import ChunkOrders
from fused_kv_llm.errors import CorpusError

LISTS = st.lists(st.lists(st.sampled_from("abcdef"), max_size=5), max_size=8)


def shared(one: list[str], other: list[str]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(earlier=LISTS, texts=st.lists(st.sampled_from("abcdef"), max_size=6))
def test_the_beginning_is_the_longest_that_an_earlier_prompt_had(earlier: list[list[str]], texts: list[str]) -> None:
    orders, asked = ChunkOrders(), list[list[str]]()
    for one in earlier:
        asked.append(list(dict.fromkeys(one[at] for at in orders.order(one))))
    order = orders.order(texts)
    assert sorted(order) == list(range(len(texts)))
    ordered = [texts[at] for at in order]
    most = max((next((n for n, x in enumerate(one) if x not in texts), len(one)) for one in asked), default=0)
    assert max((shared(ordered, one) for one in asked), default=0) == most
    assert order[most:] == sorted(order[most:]), "the others stand as they were given"


def test_what_is_only_proposed_is_not_remembered() -> None:
    orders = ChunkOrders()
    assert orders.order(["b", "a"], remember=False) == [0, 1]
    assert orders.order(["a", "b"]) == [0, 1]
    assert orders.order(["b", " a\n"]) == [1, 0], "white space around a chunk does not count"
    orders.clear()
    assert orders.order(["b", "a"]) == [0, 1]


def test_long_chunks_count_more_and_old_orders_are_forgotten() -> None:
    orders = ChunkOrders(limit=2)
    orders.order(["a", "b"])
    orders.order(["c" * 9])
    assert orders.order(["a", "b", "c" * 9], remember=False) == [2, 0, 1]
    orders.order(["x"])
    assert orders.order(["b", "a"], remember=False) == [0, 1]


def test_one_string_is_refused() -> None:
    with pytest.raises(CorpusError, match="is one string"):
        ChunkOrders().order("chunk")


def test_at_ratio_one_the_common_prefix_is_not_computed_again(tmp_path: Path) -> None:
    options = {"dtype": "float32", "preprocessing": "none", "recompute_ratio": 1.0, "prefix_cache_bytes": 2**26}
    model, tokenizer = tiny_model(), smollm2_tokenizer()
    with FusedKVEngine(model, tokenizer=tokenizer, kv_dir=tmp_path, **options) as engine:
        first, second = SHORT[:4], [SHORT[5], SHORT[1], SHORT[0]]
        engine.generate(rag_prompt([first[at] for at in engine.order_chunks(first)]), max_tokens=1)
        given_order = engine.generate(rag_prompt(second), max_tokens=1).report
        order = engine.order_chunks(second)
        assert order == [2, 1, 0]
        ordered = engine.generate(rag_prompt([second[at] for at in order]), max_tokens=1).report
        tokens = sum(len(engine.token_ids(text)) for text in SHORT[:2])
        assert ordered.prefix_tokens > tokens > given_order.prefix_tokens
        engine.clear_prefix_cache()
        assert engine.order_chunks(second) == [0, 1, 2]
