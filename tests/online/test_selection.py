"""Layers that score a context in models some of whose layers have a window, and which tokens are of names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from corpus import rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.online.selection import global_layers
from fused_kv_llm.selectors import Probe, SinkAttention

GEMMA = (5, 11, 17)


@pytest.mark.parametrize(
    ("layers", "without_window", "wanted"),
    [
        ((4, 5, 6), (), (4, 5, 6)),
        ((), GEMMA, ()),
        ((5, 6, 11, 12, 17), GEMMA, GEMMA),
        ((5, 11, 17), (5, 11, 17, 23, 29), (5, 11, 17)),
        (range(4, 10), GEMMA, (5, 11)),
        (range(6, 15), (5, 11, 17, 23), (11, 17)),
        ((7, 8, 9, 10), GEMMA, (5, 11)),
        (range(4, 10), (5,), (5,)),
        ((17,), GEMMA, (17,)),
        ((16,), GEMMA, (17,)),
        ((14,), GEMMA, (17,)),
    ],
    ids=[
        "no windows",
        "nothing",
        "all",
        "three of five",
        "one",
        "one of four",
        "none",
        "the model has one",
        "single",
        "single, none",
        "single, a tie: the deeper",
    ],
)
def test_two_layers_without_a_window_score_where_several_are_wanted(
    layers: Sequence[int], without_window: Sequence[int], wanted: tuple[int, ...]
) -> None:
    assert global_layers(layers, without_window) == wanted


TEXTS = [
    "The ferry Aldebaran left Zürich at 7:45, as Łukasz and ÉLISE told 1,250 others in Ålesund.",
    'nothing here has a name, but iPhones and x2 do count: a mixed-up "Quote" and (Brackets), too.',
]


@pytest.mark.parametrize("selector", ["sink_attention_names", "sink_attention"])
def test_tokens_of_names_and_numbers_are_told_by_their_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selector: str
) -> None:
    seen, select = list[Probe](), SinkAttention.select

    def told(self: SinkAttention, probe: Probe, budget: int) -> object:
        seen.append(probe)
        return select(self, probe, budget)

    monkeypatch.setattr(SinkAttention, "select", told)
    tokenizer = smollm2_tokenizer()
    with FusedKVEngine(tiny_model(), tokenizer=tokenizer, kv_dir=tmp_path, preprocessing="none") as engine:
        engine.build_kv_cache(TEXTS, progress=False)
        prompt = rag_prompt(TEXTS, "who left?")
        engine.prefill(prompt, selector=selector, recompute_ratio=0.3)[0].cache.release()
        ids = engine.encode(prompt)
    (probe,) = seen
    if selector == "sink_attention":
        assert probe.named is None
        return
    assert probe.named is not None
    named = {tokenizer.decode([ids[at]]).strip() for at in probe.positions[probe.named].tolist()}
    others = {tokenizer.decode([ids[at]]).strip() for at in probe.positions[~probe.named].tolist()}
    assert {"The", "Z", "7", "4", "5", "1", "2", "0", "É"} <= named
    assert {"ferry", "left", "at", ":", ",", "and", "nothing", "name", "i", "x"} <= others
    assert not {text for text in others if text[:1].isupper() or any(map(str.isdigit, text))}
