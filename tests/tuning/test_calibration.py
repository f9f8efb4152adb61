"""Calibration: the smallest ratio that meets the target is found, kept, and used by ``recompute_ratio="auto"``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from corpus import PASSAGES, SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from typer.testing import CliRunner

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.cli import app
from fused_kv_llm.engine import calibration_path
from fused_kv_llm.errors import ConfigError, CorpusError
from fused_kv_llm.offline import questions_from_chunks
from fused_kv_llm.report import FusionReport
from fused_kv_llm.tuning.calibration import calibrate
from fused_kv_llm.tuning.calibration_prompts import CalibrationPrompts
from fused_kv_llm.tuning.confidence import lower_bound

QUESTIONS = ["How many passengers can the Aldebaran carry?", "When does the ferry sail?", "Who is the captain?"]


def make_engine(folder: Path, **options: object) -> FusedKVEngine:
    options = {"preprocessing": "none", "store_misses": False, **options}
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)  # type: ignore[arg-type]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:8], progress=False)
        yield engine


def test_questions_are_made_of_the_chunks() -> None:
    made = questions_from_chunks(PASSAGES[:10], 4)
    assert len(made) == 4
    for question, chunk in made:
        quoted = question.split('"')[1].removesuffix(" ...")
        assert quoted in " ".join(chunk.split())
    assert made == questions_from_chunks(PASSAGES[:10], 4), "the same corpus makes the same questions"
    assert questions_from_chunks(["Too short."], 4) == []


def test_the_smallest_ratio_that_is_shown_to_meet_the_target_is_kept(engine: FusedKVEngine, tmp_path: Path) -> None:
    result = calibrate(engine, QUESTIONS, target_agreement=0.2, ratios=(1.0, 0.0, 0.9), num_chunks=3)
    by_ratio = {point.ratio: point for point in result.points}
    assert by_ratio[1.0].agreement == 1.0, "full prefill agrees with itself"
    want = 1.0
    for ratio in (0.9, 0.0):
        if lower_bound(by_ratio[ratio].agreements, 0.95) < 0.2:
            break
        want = ratio
    assert result.chosen.recompute_ratio == want
    assert want < 1.0, "or else the test says little"
    assert result.chosen.agreement_bound == result.choice.bound >= 0.2
    assert (result.chosen.confidence, result.chosen.questions, result.chosen.asked) == (0.95, 3, "given")
    with make_engine(tmp_path, recompute_ratio="auto") as again:
        assert again.recompute_ratio == want
        assert again.selector == result.chosen.selector
        assert again.calibration() == result.chosen
    assert engine.generate(rag_prompt(SHORT[:3]), max_tokens=1, recompute_ratio="auto").report.recompute_ratio == want


def test_few_questions_show_nothing_and_it_says_how_many_would(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if every answer agrees: three questions are no proof of 95 %."""
    monkeypatch.setattr(CalibrationPrompts, "choices", lambda self, prompt, answer, *way: (answer, FusionReport(), 0.1))
    result = calibrate(engine, QUESTIONS, target_agreement=0.95, ratios=(0.0, 0.3), num_chunks=2)
    assert result.chosen.recompute_ratio == 1.0
    assert result.choice.next is not None
    assert result.choice.next.questions == pytest.approx(56, abs=4)
    assert "3 questions do not show that 0.3 with sink_attention is good enough" in result.advice
    assert f"about {result.choice.next.questions} more questions would" in result.advice
    # A question that is asked twice is no second witness.
    many = calibrate(engine, QUESTIONS[:1] * 80, target_agreement=0.95, ratios=(0.0, 0.3), num_chunks=2)
    assert (many.chosen.questions, many.chosen.recompute_ratio) == (1, 1.0)
    enough = [f"Which ferry has {number} cars?" for number in range(65)]
    shown = calibrate(engine, enough, target_agreement=0.95, ratios=(0.0, 0.3), num_chunks=2, answer_tokens=1)
    assert (shown.chosen.recompute_ratio, shown.advice) == (0.0, "")
    assert shown.chosen.agreement_bound == pytest.approx(0.05 ** (1 / 65), abs=0.003)


def test_a_selector_is_measured_with_the_anchors_that_it_asks_for(engine: FusedKVEngine) -> None:
    """The store was filled for another selector, so it has none until then."""
    calibrate(engine, QUESTIONS[:1], target_agreement=0.5, ratios=(0.3,), selectors=("qcfuse",), num_chunks=3)
    assert engine.build_anchors(SHORT[:8], selector="qcfuse", progress=False) == 0
    warnings = engine.prefill(rag_prompt(SHORT[:3]), recompute_ratio=0.3, selector="qcfuse")[1].warnings
    assert not [warning for warning in warnings if "anchors" in warning]


def test_its_own_prompts_leave_no_variants_behind(tmp_path: Path) -> None:
    with make_engine(tmp_path, variants=2) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        calibrate(engine, QUESTIONS[:1], ratios=(0.3,), num_chunks=3, answer_tokens=1)
        engine.wait_for_background()
        assert engine.corpus.variants is not None
        assert engine.corpus.variants.usage()[0] == 0
        engine.generate(rag_prompt(SHORT[:3]), max_tokens=1)
        engine.wait_for_background()
        assert engine.corpus.variants.usage()[0] > 0, "others do"


def test_chunks_are_searched_with_the_engines_embedder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lengths:
        """Says that texts are alike whose lengths are."""

        name = "lengths"

        def encode(self, texts: Sequence[str]) -> np.ndarray:
            angles = np.array([len(text) / 200 for text in texts])
            return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    monkeypatch.setattr("fused_kv_llm.offline.questions.SentenceEmbedder", lambda: pytest.fail("an embedder was made"))
    with make_engine(tmp_path, embedder=Lengths()) as engine:
        engine.build_kv_cache([SHORT[0][:60].strip(), *SHORT[1:5]], progress=False)
        prompts = CalibrationPrompts(engine, ["What is " + "so very " * 6 + "short?"], 1, 1, 1)
        assert SHORT[0][:60].strip() in prompts.answered(prompts.asked[0][0], "")[0]


def test_full_prefill_is_chosen_when_nothing_else_is_good_enough(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        CalibrationPrompts, "choices", lambda self, prompt, answer, *way: ([-1] * len(answer), FusionReport(), 0.1)
    )
    result = calibrate(engine, QUESTIONS[:1], ratios=(0.0, 0.3), num_chunks=2)
    assert (result.chosen.recompute_ratio, result.chosen.agreement_bound) == (1.0, 1.0)
    assert "More questions would not help" in result.advice


def test_auto_without_a_calibration_says_what_to_run(engine: FusedKVEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run: fused-kv calibrate --kv-dir"):
        make_engine(tmp_path, recompute_ratio="auto")
    with pytest.raises(ConfigError, match=r"run: fused-kv calibrate --kv-dir"):
        engine.generate("hello", recompute_ratio="auto")


@pytest.mark.parametrize("content", ["", "[]", '{"identity": 1}', "\x00"])
def test_a_damaged_calibration_is_refused(engine: FusedKVEngine, content: str) -> None:
    calibration_path(engine.store.kv_dir, engine.identity).write_text(content)
    with pytest.raises(ConfigError, match="fused-kv calibrate"):
        engine.generate("hello", recompute_ratio="auto")


def test_a_calibration_of_another_model_is_refused(engine: FusedKVEngine) -> None:
    calibrate(engine, QUESTIONS[:1], ratios=(0.0,), num_chunks=2)
    path = calibration_path(engine.store.kv_dir, engine.identity)
    path.write_text(json.dumps({**json.loads(path.read_text()), "identity": "another"}))
    with pytest.raises(ConfigError, match="another model or damaged"):
        engine.generate("hello", recompute_ratio="auto")


def test_bad_targets_and_empty_stores_are_refused(engine: FusedKVEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target_agreement=1\.5"):
        calibrate(engine, QUESTIONS, target_agreement=1.5)
    with make_engine(tmp_path / "empty") as empty, pytest.raises(CorpusError, match="holds no chunk of this model"):
        calibrate(empty, QUESTIONS)


UNUSABLE = [
    ({"questions": []}, CorpusError, "No questions were given"),
    ({"questions": ["When?", " \n"]}, CorpusError, r"Question 2 of 2 is ' \\n': give texts, none empty"),
    ({"questions": [None]}, CorpusError, "Question 1 of 1 is None"),
    ({"questions": "When?"}, CorpusError, "is one string: give a list"),
    ({"selectors": ["sink_attention", "qcfus"]}, ConfigError, "selector='qcfus' is unknown: use one of"),
    ({"selectors": "qcfuse"}, ConfigError, "is not a list of names"),
    ({"selectors": []}, ConfigError, "is not a list of names"),
    ({"selectors": [7]}, ConfigError, "give names of selectors"),
    ({"ratios": []}, ConfigError, "ratios is empty"),
    ({"ratios": [0.0, 1.5]}, ConfigError, r"recompute_ratio=1\.5"),
    ({"target_agreement": "most"}, ConfigError, "target_agreement='most'"),
    ({"confidence": 1.0}, ConfigError, r"confidence=1\.0 is outside \(0, 1\)"),
    ({"num_questions": 0}, ConfigError, "num_questions=0"),
    ({"num_chunks": 0}, ConfigError, "num_chunks=0"),
    ({"answer_tokens": 1.5}, ConfigError, r"answer_tokens=1\.5"),
]


@pytest.mark.parametrize(("option", "error", "says"), UNUSABLE, ids=[str(option) for option, _, _ in UNUSABLE])
def test_what_cannot_be_used_is_refused_before_anything_runs(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch, option: dict[str, object], error: type, says: str
) -> None:
    monkeypatch.setattr(engine, "prefill", lambda *args, **options: pytest.fail("the model ran"))
    monkeypatch.setattr(engine, "generate", lambda *args, **options: pytest.fail("the model ran"))
    monkeypatch.setattr("fused_kv_llm.offline.questions.SentenceEmbedder", lambda: pytest.fail("an embedder was made"))
    with pytest.raises(error, match=says):
        calibrate(engine, **{"questions": QUESTIONS, **option})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lines", "options", "says"),
    [
        ('{"question": "When?"}\n{"question": ""}\n', [], "Question 2 of 2 is ''"),
        ('{"question": null}\n', [], "Question 1 of 1 is None"),
        ("When?\n", ["--selector", "qcfus"], "selector='qcfus' is unknown"),
        ("When?\n", ["--target-agreement", "2"], "target_agreement=2.0"),
        ("When?\n", ["--confidence", "0"], "confidence=0.0 is outside"),
    ],
)
def test_the_command_refuses_it_before_the_model_is_loaded(
    engine: FusedKVEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, options: list[str], says: str
) -> None:
    monkeypatch.setattr("fused_kv_llm.engine.FusedKVEngine", lambda *args, **options: pytest.fail("loads the model"))
    (tmp_path / "questions.txt").write_text(lines)
    kv_dir, questions = str(engine.store.kv_dir), str(tmp_path / "questions.txt")
    result = CliRunner().invoke(app, ["calibrate", "--kv-dir", kv_dir, "--questions", questions, *options])
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())
