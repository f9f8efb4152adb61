"""Layers of several KV shapes are kept padded: what is behind a layer's own heads and dimensions changes nothing.

The oracle is the same model without padding, since its layers have one shape.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import Geometry, KVShape
from fused_kv_llm.selectors import QCFUSE, SELECTORS, Anchors


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Give every layer room for more heads and dimensions than it has."""

    def room(geometry: Geometry) -> KVShape:
        heads, key_dim, value_dim = geometry.shapes[0]
        return KVShape(heads + 1, key_dim + 8, value_dim + 4)

    monkeypatch.setattr(Geometry, "room", property(room))
    return monkeypatch


def answers(folder: Path, kv_dtype: str) -> dict[str, tuple[torch.Tensor, torch.Tensor, list[str]]]:
    """Return logits, selected tokens and warnings of every selector, with context shifts."""
    found = {}
    options = {"tokenizer": smollm2_tokenizer(), "kv_dir": folder, "kv_dtype": kv_dtype, "store_misses": False}
    with FusedKVEngine(tiny_model(), **options) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False, preprocess="wait")
        ranked = [replace(QCFUSE, name=f"qcfuse_{rule}", anchors=Anchors(rule, 0.2)) for rule in ("knorm", "sink")]
        for selector in (QCFUSE, *ranked):
            assert engine.build_anchors(SHORT[:4], selector=selector, progress=False) == 4
        for selector in (*SELECTORS.values(), *ranked):
            name = selector.name
            fused, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3, selector=selector)
            assert report.chunks_found == 5
            found[name] = fused.logits, fused.selected, report.warnings
    return found


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_padding_changes_no_answer(kv_dtype: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    want = answers(tmp_path / "as_they_are", kv_dtype)
    request.getfixturevalue("padded")
    got = answers(tmp_path / "padded", kv_dtype)
    for name, (logits, selected, warnings) in want.items():
        assert torch.equal(got[name][1], selected), name
        assert got[name][2] == warnings
        torch.testing.assert_close(got[name][0], logits, atol=1e-5, rtol=1e-5, msg=name)
