"""The profile of anchors (QCFuse figure 6): recall by rule and ratio, and which anchors are chosen and used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model
from typer.testing import CliRunner

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.cli import app
from fused_kv_llm.errors import ConfigError, CorpusError
from fused_kv_llm.online import view_of
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import SELECTORS, Anchors, QueryAttention, View, anchors_of, save_anchors
from fused_kv_llm.tuning.anchor_profile import choose_anchors, profile_anchors
from fused_kv_llm.tuning.layer_profile import SpanSample, gold_positions, recall_by_layer

SAMPLES = [SpanSample("Who?", (SHORT[i].split()[3],), tuple(SHORT[i : i + 3])) for i in range(2)]


def make_engine(folder: Path) -> FusedKVEngine:
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, preprocessing="none")


def test_recall_is_that_of_all_layers_with_each_rule_and_ratio(tmp_path: Path) -> None:
    with make_engine(tmp_path / "profile") as engine:
        profile = profile_anchors(engine, SAMPLES, rules=["knorm", "sink"], ratios=[0.3, 0.1])
        assert engine.stored_texts() == []
    assert list(profile.recall) == [Anchors(rule, ratio) for rule in ("knorm", "sink") for ratio in (0.1, 0.3)]
    assert profile.samples == 2
    with make_engine(tmp_path / "by-hand") as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        for anchors in [*profile.recall, None]:
            view = View((0, 1, 2), full_context=anchors is None, anchors=anchors)
            if anchors is not None:
                whole = QueryAttention("whole", layers=(0, 1, 2), anchors=anchors)
                engine.build_anchors(SHORT[:4], selector=whole, progress=False)
            total = 0.0
            for sample in SAMPLES:
                positions, scores = engine.requests.attention_by_layer(sample.prompt, view)
                together = scores.sum(0, keepdim=True)
                found = recall_by_layer(together, positions, gold_positions(engine, sample))
                assert found is not None
                total += float(found[0])
            want = profile.reference if anchors is None else profile.recall[anchors]
            assert total / 2 == pytest.approx(want)


def test_the_whole_context_is_probed_as_requests_probe_it(tmp_path: Path) -> None:
    """The reference's scores are those by which ``prophetkv`` selects."""
    prompt = SAMPLES[0].prompt
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        positions, scores = engine.requests.attention_by_layer(prompt, View((0, 1, 2), full_context=True))
        best = positions[scores.mean(0).topk(int(0.2 * positions.shape[0])).indices].sort().values
        fused, _ = engine.prefill(prompt, recompute_ratio=0.2, selector="prophetkv")
        assert fused.selected.tolist() == best.tolist()


def test_the_fewest_anchors_that_come_near_the_whole_context_are_chosen() -> None:
    few, more, best = Anchors("sink", 0.05), Anchors("knorm", 0.1), Anchors("kvzip", 0.1)
    assert choose_anchors({few: 0.3, more: 0.48, best: 0.49}, 0.5) == best
    assert choose_anchors({few: 0.48, more: 0.48, best: 0.49}, 0.5) == few
    assert choose_anchors({few: 0.1, more: 0.3, best: 0.2}, 0.5) == more, "none comes near"


def test_questions_without_an_answer_and_unknown_rules_are_refused(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        with pytest.raises(CorpusError, match="nothing to profile by"):
            profile_anchors(engine, [SpanSample("Who?", ("zebra",), tuple(SHORT[:2]))], rules=["sink"], ratios=[0.1])
        with pytest.raises(ConfigError, match="rule='longest'"):
            profile_anchors(engine, SAMPLES, rules=["longest"])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="no rule or no ratio"):
            profile_anchors(engine, SAMPLES, ratios=[])


def test_qcfuse_takes_the_anchors_of_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_kv_llm.selectors.profiles.cache_folder", lambda: tmp_path / "cache")
    with make_engine(tmp_path / "kv") as engine:
        before = view_of(SELECTORS["qcfuse"], engine.loaded, None, FusionReport())
        assert before.anchors == Anchors("kvzip", 0.1)  # type: ignore[union-attr]
        assert anchors_of(engine.model_fingerprint) is None
        save_anchors(engine.model_fingerprint, {"rule": "knorm_high", "ratio": 0.2})
        after = view_of(SELECTORS["qcfuse"], engine.loaded, None, FusionReport())
        assert after.anchors == Anchors("knorm_high", 0.2)  # type: ignore[union-attr]
        chosen = QueryAttention("mine", layers="critical", anchors=Anchors("sink", 0.3))
        mine = view_of(chosen, engine.loaded, None, FusionReport())
        assert mine.anchors == Anchors("sink", 0.3), "anchors that were asked for stay"  # type: ignore[union-attr]


@pytest.mark.real_model
def test_the_command_keeps_the_anchors_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_kv_llm.selectors.profiles.cache_folder", lambda: tmp_path / "cache")
    passages = [{"id": str(i), "text": text} for i, text in enumerate(SHORT[:2])]
    record = {"question": "Who?", "answers": [SHORT[0].split()[3]], "passages": passages, "gold_passage_ids": ["0"]}
    (tmp_path / "set.jsonl").write_text(json.dumps(record))
    command = ["calibrate", "anchors", "--data", str(tmp_path / "set.jsonl"), "--ratio", "0.3", "--ratio", "0.1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (kept,) = (tmp_path / "cache" / "anchors").iterdir()
    profile = json.loads(kept.read_text())
    assert anchors_of(profile["fingerprint"]) == Anchors(profile["rule"], profile["ratio"])
    assert {rule: list(by_ratio) for rule, by_ratio in profile["recall"].items()} == {
        rule: ["0.1", "0.3"] for rule in ("kvzip", "knorm", "knorm_high", "sink")
    }
