"""Preprocessing for a sample of questions: the shifts that ingesting the whole corpus makes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from evaluation.asked_chunks import preprocess_asked
from models import smollm2_tokenizer, tiny_model

from fused_kv_kernels import row_attention
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.context_shift import shift_name
from fused_kv_llm.demo import handbook_passages
from fused_kv_llm.model import attention_rule
from fused_kv_llm.offline import preprocess

CORPUS = handbook_passages()[:24]
ASKED = CORPUS[3:20:4]


def opened(folder: Path, **options: object) -> FusedKVEngine:
    options = {"preprocessing": "similar", "store_misses": False, **options}
    # None of its layers is too small for eight bits.
    model = tiny_model(hidden_size=192, intermediate_size=256)
    return FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)  # type: ignore[arg-type]


def shift_of(engine: FusedKVEngine, text: str) -> list[torch.Tensor]:
    name = shift_name(engine.config.neighbours, engine.config.preprocessing_prompts)
    side = engine.store.sidecars.read(str(engine.chunk_id(text)), name)
    assert side is not None
    return [side[part] * side[f"{part}_scale"] for part in ("keys", "values")]


@pytest.mark.parametrize(("prompts", "eight_bits"), list(product((1, 2), ("none", "linears", "linears and attention"))))
def test_asked_chunks_get_the_shifts_of_the_whole_corpus(
    tmp_path: Path, prompts: int, eight_bits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eight bits, too; how attention rounds a key depends on the keys behind it, and so on where a prompt is cut."""
    monkeypatch.setattr(preprocess, "WORTH_EIGHT_BITS_TOKENS", 10**9 if eight_bits == "none" else 1)
    if eight_bits == "linears":
        monkeypatch.setattr(attention_rule, "eight_bit_row_attention", row_attention)
    with opened(tmp_path / "whole", preprocessing_prompts=prompts) as engine:
        engine.build_kv_cache(CORPUS, preprocess="wait", progress=False)
        want = {text: shift_of(engine, text) for text in ASKED}
    with opened(tmp_path / "asked", preprocessing_prompts=prompts) as engine:
        engine.build_kv_cache(ASKED, preprocess="later", progress=False)
        assert preprocess_asked(engine, [f" {text}\n" for text in CORPUS], ASKED) == len(ASKED)
        for text, parts in want.items():
            for got, part in zip(shift_of(engine, text), parts, strict=True):
                if eight_bits == "linears and attention":
                    assert float((got - part).norm()) < 0.06 * float(part.norm())
                else:
                    assert float((got - part).abs().max()) < 0.02 * float(part.abs().max())
        assert preprocess_asked(engine, CORPUS, ASKED) == 0


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "similar") as engine, pytest.raises(ValueError, match="1 of 2 chunks"):
        preprocess_asked(engine, CORPUS, [CORPUS[0], "A passage that nobody has heard of."])
    with opened(tmp_path / "other", preprocessing="fusionrag") as engine, pytest.raises(ValueError, match="fusionrag"):
        preprocess_asked(engine, CORPUS, ASKED)
