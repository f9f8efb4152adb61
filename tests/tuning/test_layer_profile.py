"""Critical layers: answer spans, recall, and a profile against a hand count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model
from tiny_families import tiny_model as family_model
from typer.testing import CliRunner

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.cli import app
from fused_kv_llm.errors import CorpusError
from fused_kv_llm.model import load_model
from fused_kv_llm.selectors import Anchors, View
from fused_kv_llm.selectors.profiles import critical_layers, save_anchors
from fused_kv_llm.tuning.layer_profile import (
    SpanSample,
    answer_token_positions,
    profile_layers,
    read_span_samples,
    recall_by_layer,
)


def test_answer_positions_are_whole_words_inside_the_context() -> None:
    text = "Q: ten? ten men, often ten"
    offsets = np.array([[0, 2], [3, 7], [8, 11], [12, 16], [17, 22], [22, 24], [24, 26]])
    assert answer_token_positions(text, offsets, ["ten"], 8, 26) == [2, 5, 6]


def test_recall_by_layer_counts_what_each_layer_selects() -> None:
    positions = torch.arange(100, 120)
    scores = torch.zeros(2, 20)
    scores[0, [3, 7]] = 1.0
    scores[1, [3, 9]] = 1.0
    found = recall_by_layer(scores, positions, [103, 107, 5])
    assert found is not None
    assert found.tolist() == [1.0, 0.5]
    assert recall_by_layer(scores, positions, [5]) is None


def test_samples_keep_the_gold_passage_and_the_order(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    passages = [{"id": str(i), "text": f"{text} Number {i}."} for i, text in enumerate(SHORT[:4])]
    lines = [
        {"question": "Which?", "answers": [f"Number {i}"], "passages": passages, "gold_passage_ids": [str(i)]}
        for i in (3, 0)
    ]
    lines.append({**lines[0], "answers": ["not there"]})
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_span_samples(path, 9, num_passages=2)
    assert [p[-2] for p in first.passages] == ["0", "3"]
    assert [p[-2] for p in second.passages] == ["0", "1"]
    assert len(read_span_samples(path, 9, skip=1)) == 1
    with pytest.raises(CorpusError, match="No question"):
        read_span_samples(path, 9, skip=2)
    path.write_text('{"question": "Which?"}')
    with pytest.raises(CorpusError, match="Line 1 of"):
        read_span_samples(path, 9)


def test_a_profile_is_the_mean_recall_of_every_layer(tmp_path: Path) -> None:
    samples = [SpanSample("Who?", (SHORT[i].split()[3],), tuple(SHORT[i : i + 3])) for i in range(3)]
    anchors = Anchors("sink", 0.2)
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, store_misses=False) as engine:
        profile = profile_layers(engine, samples, anchors=anchors, top=2)
        want = torch.zeros(3, dtype=torch.float64)
        for sample in samples:
            positions, scores = engine.requests.attention_by_layer(sample.prompt, View((0, 1, 2), anchors=anchors))
            ids = engine.encode(sample.prompt)
            word = sample.answers[0]
            gold = [p for p in positions.tolist() if engine.tokenizer.decode([ids[p]]).strip() == word]
            assert gold
            found = recall_by_layer(scores, positions, gold)
            assert found is not None
            want += found / 3
    assert profile.samples == 3
    assert profile.recall == pytest.approx(want.tolist())
    assert list(profile.layers) == torch.sort(want, descending=True, stable=True).indices[:2].tolist()
    assert profile.recall_of_top[0] == pytest.approx(float(want.max()))


def test_layers_are_profiled_with_the_anchors_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """QCFuse profiles its layers with the anchors that it uses (section 3.4 after 3.3.1)."""
    monkeypatch.setattr("fused_kv_llm.selectors.profiles.cache_folder", lambda: tmp_path / "cache")
    samples = [SpanSample("Who?", (SHORT[i].split()[3],), tuple(SHORT[i : i + 3])) for i in range(3)]
    model, tokenizer = tiny_model(), smollm2_tokenizer()
    with FusedKVEngine(model, tokenizer=tokenizer, kv_dir=tmp_path / "kv", store_misses=False) as engine:
        save_anchors(engine.model_fingerprint, {"rule": "sink", "ratio": 0.2})
        found = profile_layers(engine, samples)
        assert found == profile_layers(engine, samples, anchors=Anchors("sink", 0.2))
        assert found != profile_layers(engine, samples, anchors=Anchors())


def test_layers_with_a_window_are_not_profiled(tmp_path: Path) -> None:
    """They do not see most of a context; the others keep their own numbers."""
    samples = [SpanSample("Who?", (SHORT[i].split()[3],), tuple(SHORT[i : i + 3])) for i in range(3)]
    model, tokenizer = family_model("gemma3_text"), smollm2_tokenizer()
    with FusedKVEngine(model, tokenizer=tokenizer, kv_dir=tmp_path, store_misses=False) as engine:
        assert engine.loaded.geometry.global_layers == (1, 3)
        profile = profile_layers(engine, samples, anchors=Anchors("sink", 0.2), top=2)
    assert sorted(profile.layers) == [1, 3]
    assert len(profile.recall) == 4
    assert profile.recall[0] == profile.recall[2] == 0.0
    assert profile.recall_of_top[0] == max(profile.recall[1], profile.recall[3]) > 0.0
    assert len(profile.recall_of_top) == 2


@pytest.mark.real_model
def test_the_command_keeps_the_profile_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_kv_llm.selectors.profiles.cache_folder", lambda: tmp_path / "cache")
    passages = [{"id": str(i), "text": text} for i, text in enumerate(SHORT[:2])]
    record = {"question": "Who?", "answers": [SHORT[0].split()[3]], "passages": passages, "gold_passage_ids": ["0"]}
    (tmp_path / "set.jsonl").write_text(json.dumps(record))
    result = CliRunner().invoke(app, ["calibrate", "layers", "--data", str(tmp_path / "set.jsonl"), "--top", "2"])
    assert result.exit_code == 0, result.output
    (kept,) = (tmp_path / "cache" / "critical_layers").iterdir()
    profile = json.loads(kept.read_text())
    assert len(profile["layers"]) == 2
    assert len(profile["recall"]) == 30
    assert critical_layers(profile["fingerprint"], 30) == (tuple(sorted(profile["layers"])), True)


@pytest.mark.real_model
def test_the_embedded_model_comes_with_its_profile() -> None:
    loaded = load_model("smollm2-135m", dtype="float32")
    assert critical_layers(loaded.fingerprint, 30) == ((21, 22, 23), True)
