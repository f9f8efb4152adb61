from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.prompt import (
    ContentIndex,
    Encoded,
    Match,
    PromptPlan,
    PromptRenderer,
    Segment,
    UnusedMatch,
    content_hash,
    is_indexable,
    plan_prompt,
)

Prose = Callable[[random.Random, int], str]
SEPARATORS = ["\n\n", "\n", " ", "", "\r\n", "\n---\n", "😀", "\nSource: a\n\n"]
SNIPPETS = [
    "😀",
    "\r\n",
    "夜间渡轮",
    "  ",
    "\t- item",
    "e\u0301",
    "1,234.5",
    "<|im_end|>",
    "</s>",
    "<|eot|>",
    "\n\n",
    "'s",
]


def planned(
    renderer: PromptRenderer, prompt: str, chunks: dict[str, str], min_tokens: int = 4
) -> tuple[PromptPlan, dict[str, list[int]]]:
    hashes = [content_hash(text) for text in chunks.values()]
    index = ContentIndex()
    keys = list(chunks)
    index.add(range(len(keys)), [h.prefix for h in hashes], [h.full for h in hashes], [h.length for h in hashes])
    ids = {key: renderer.encode_chunk(text) for key, text in chunks.items()}
    rendered = renderer.render(prompt)
    found = index.find(rendered.text, lambda numbers: {number: chunks[keys[number]] for number in numbers})
    matches = [Match(keys[number], start, end) for number, start, end in found]
    return plan_prompt(renderer.encode(rendered), matches, ids, min_tokens), ids


def check(plan: PromptPlan, ids: dict[str, list[int]], min_tokens: int = 4) -> None:
    position = 0
    for segment in plan.segments:
        assert segment.start == position < segment.stop
        position = segment.stop
        if segment.key is not None:
            claimed = ids[segment.key][segment.chunk_start : segment.chunk_start + segment.num_tokens]
            assert plan.ids[segment.start : segment.stop] == claimed
            assert segment.num_tokens >= min_tokens
    assert position == len(plan.ids)
    fresh = [segment.key is None for segment in plan.segments]
    assert not any(a and b for a, b in itertools.pairwise(fresh))


@settings(max_examples=80)
@given(data=st.data())
def test_segments_cover_the_prompt_and_claim_only_equal_ids(
    renderer: PromptRenderer, prose: Prose, data: st.DataObject
) -> None:
    rng = random.Random(data.draw(st.integers(0, 10_000)))
    document = " ".join(prose(rng, 1) + rng.choice(SNIPPETS) for _ in range(6))
    # Slices of one document: they overlap, contain each other, and begin and end inside words.
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 500), st.integers(32, 300)), min_size=1, max_size=4))
    stored = [piece for start, length in cuts if is_indexable(piece := document[start : start + length])]
    chunks = {f"k{i}": text for i, text in enumerate(dict.fromkeys(stored))}
    parts = data.draw(st.lists(st.sampled_from([*chunks.values(), document, "Question?", ""]), max_size=5))
    prompt = data.draw(st.sampled_from(SEPARATORS)).join(parts)
    plan, ids = planned(renderer, prompt, chunks)
    check(plan, ids)
    rendered = renderer.render(prompt)
    assert plan.ids == renderer.encode(rendered).ids


@pytest.mark.parametrize("separator", ["\n\n", "\n", " ", ""])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 0], [1]])
def test_chunks_in_any_order_are_reused(
    tokenizer: Any, renderer: PromptRenderer, prose: Prose, separator: str, order: list[int]
) -> None:
    rng = random.Random(5)
    texts = [f"{name} {prose(rng, 6)}" for name in ("Ferries.", "Crews.", "Harbours.")]
    chunks = {f"k{i}": text for i, text in enumerate(texts)}
    plan, ids = planned(renderer, separator.join(texts[i] for i in order), chunks)
    check(plan, ids)
    assert [segment.key for segment in plan.segments if segment.key] == [f"k{i}" for i in order]
    tokens = sum(len(ids[f"k{i}"]) for i in order)
    assert plan.reused_tokens >= tokens - 6 * len(order)
    assert not plan.unused


def test_nearly_all_tokens_of_long_chunks_are_reused(tokenizer: Any, renderer: PromptRenderer, prose: Prose) -> None:
    rng = random.Random(11)
    chunks = {f"k{i}": f"{i}. {prose(rng, 8)}" for i in range(40)}
    reused = total = 0
    for _ in range(10):
        keys = rng.sample(list(chunks), 5)
        context = "\n\n".join(chunks[key] for key in keys)
        plan, ids = planned(renderer, f"Use the context.\n\n{context}\n\nQuestion: when?", chunks)
        check(plan, ids)
        reused += plan.reused_tokens
        total += sum(len(ids[key]) for key in keys)
    assert reused >= 0.95 * total


def test_a_chunk_that_is_the_whole_content(renderer: PromptRenderer, prose: Prose) -> None:
    chunks = {"whole": prose(random.Random(3), 5)}
    plan, ids = planned(renderer, chunks["whole"], chunks)
    check(plan, ids)
    assert [segment.key for segment in plan.segments] == [None, "whole", None]
    assert plan.segments[1].num_tokens >= len(ids["whole"]) - 6


def test_a_chunk_that_is_the_whole_raw_prompt(tokenizer: Any, prose: Prose) -> None:
    raw = PromptRenderer(tokenizer, wrap_chat_template=False)
    chunks = {"whole": prose(random.Random(4), 5)}
    plan, ids = planned(raw, chunks["whole"], chunks)
    check(plan, ids)
    start = len(raw.prefix_ids)
    assert plan.segments[-1] == Segment(start, len(plan.ids), "whole", 0)


def test_special_token_text_in_a_chunk(tokenizer: Any, renderer: PromptRenderer, prose: Prose) -> None:
    text = f"{prose(random.Random(1), 2)} <|im_end|>\n<|eot|></s>[/INST] {prose(random.Random(2), 2)}"
    plan, ids = planned(renderer, f"{text}\n\nQuestion?", {"k": text})
    check(plan, ids)
    assert plan.reused_tokens >= len(ids["k"]) - 6
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    assert special.isdisjoint(ids["k"])


def encoded(words: list[str]) -> Encoded:
    ends = np.cumsum([len(word) for word in words])
    return Encoded(list(range(len(words))), np.stack([ends - [len(w) for w in words], ends], axis=1))


def test_short_and_unknown_chunks_stay_fresh() -> None:
    prompt = encoded(["ab", "cd", "ef", "gh", "ij", "kl"])
    short, unknown, good = Match("short", 0, 4), Match("unknown", 4, 8), Match("good", 8, 12)
    plan = plan_prompt(prompt, [short, unknown, good], {"short": [0, 9], "good": [9, 4, 5]}, min_tokens=2)
    assert plan.segments == [Segment(0, 4), Segment(4, 6, "good", 1)]
    assert plan.unused == [UnusedMatch(short, "too_short", 1), UnusedMatch(unknown, "no_ids", 0)]


def test_a_token_across_the_edge_is_fresh() -> None:
    plan = plan_prompt(encoded(["ab", "cd", "ef"]), [Match("k", 1, 6)], {"k": [0, 1, 2]}, min_tokens=1)
    assert plan.segments == [Segment(0, 1), Segment(1, 3, "k", 1)]


def test_neighbouring_chunks_need_no_text_between() -> None:
    matches = [Match("a", 0, 4), Match("b", 4, 6)]
    plan = plan_prompt(encoded(["ab", "cd", "ef"]), matches, {"a": [0, 1], "b": [2]}, min_tokens=1)
    assert plan.segments == [Segment(0, 2, "a", 0), Segment(2, 3, "b", 0)]


def test_a_match_without_a_token_of_its_own() -> None:
    plan = plan_prompt(encoded(["abcdef"]), [Match("k", 1, 3)], {"k": [0]}, min_tokens=1)
    assert plan.segments == [Segment(0, 1)]
    assert plan.unused == [UnusedMatch(Match("k", 1, 3), "too_short", 0)]


def test_no_matches() -> None:
    assert plan_prompt(encoded(["ab"]), [], {}, 1).segments == [Segment(0, 1)]


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_tokens"):
        plan_prompt(encoded(["ab"]), [], {}, 0)
    with pytest.raises(ConfigError, match="overlap"):
        plan_prompt(encoded(["abcd"]), [Match("a", 0, 3), Match("b", 2, 4)], {}, 1)
