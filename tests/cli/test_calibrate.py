"""``fused-kv calibrate`` with the engine's options: preprocessing, neighbours, tenant; and ``--check``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model
from typer.testing import CliRunner, Result

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.cli import app
from fused_kv_llm.engine import parts
from fused_kv_llm.model import load_model

QUESTIONS = ["How many passengers can the Aldebaran carry?", "When does the ferry sail?"]


LOADED = load_model(tiny_model(), tokenizer=smollm2_tokenizer())


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a name under which a command gets a model that is loaded already, to save seconds each time."""
    monkeypatch.setattr(parts, "load_model", lambda model, **options: LOADED)
    return "tiny"


def calibrated(model: str, kv_dir: Path, *options: str) -> Result:
    questions = kv_dir.parent / "questions.txt"
    questions.write_text("\n".join(QUESTIONS))
    given = [] if "--check" in options or "--count" in options else ["--questions", str(questions)]
    command = ["calibrate", "--kv-dir", str(kv_dir), "--model", model, "--k", "2", *given, *options]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, command)


def filled(model: str, kv_dir: Path, chunks: list[str], **options: object) -> str:
    with FusedKVEngine(model, kv_dir=kv_dir, store_misses=False, **options) as engine:  # type: ignore[arg-type]
        engine.build_kv_cache(chunks, preprocess="wait", progress=False)
        return engine.fusion_identity


def test_it_says_what_was_asked_shown_and_wanting_and_draws_it(model: str, tmp_path: Path) -> None:
    kv_dir = tmp_path / "kv"
    identity = filled(model, kv_dir, SHORT[:6], preprocessing="none")
    result = calibrated(model, kv_dir, "--preprocessing", "none", "--target-agreement", "0.9")
    assert result.exit_code == 0, result.output
    assert "Asked 2 questions, given." in result.output
    assert "recompute_ratio='auto' now means full prefill: no smaller ratio is shown to be good enough" in result.output
    assert "with a confidence of 95%" in result.output
    assert "at least" in result.output
    assert "More questions would not help" in result.output, "random weights agree on little"
    assert "easier" not in result.output
    picture = kv_dir / f"calibration-{identity[:16]}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    kept = json.loads((kv_dir / f"calibration-{identity[:16]}.json").read_text())
    assert (kept["target_agreement"], kept["confidence"], kept["made_on"]["chunks"]) == (0.9, 0.95, 6)


def test_questions_are_made_and_it_says_how(model: str, tmp_path: Path) -> None:
    kv_dir = tmp_path / "kv"
    filled(model, kv_dir, SHORT[:2], preprocessing="none")
    result = calibrated(model, kv_dir, "--preprocessing", "none", "--count", "2")
    assert result.exit_code == 0, result.output
    assert "Asked 2 questions, 2 that quote the corpus." in result.output
    assert "the model wrote 0 questions that can be used, for 2 chunks (" in " ".join(result.output.split())
    quoted = calibrated(model, kv_dir, "--preprocessing", "none", "--count", "2", "--quoted")
    assert "Asked 2 questions, 2 that quote the corpus." in quoted.output
    assert "the model wrote" not in quoted.output
    assert "may be easier to agree on than people's" in quoted.output


def test_check_says_whether_it_still_holds(model: str, tmp_path: Path) -> None:
    kv_dir, options = tmp_path / "kv", ["--preprocessing", "none"]
    filled(model, kv_dir, SHORT[:6], preprocessing="none")
    none = calibrated(model, kv_dir, *options, "--check")
    assert none.exit_code == 1
    assert "there is none" in none.output
    assert calibrated(model, kv_dir, *options).exit_code == 0
    sound = calibrated(model, kv_dir, *options, "--check")
    assert sound.exit_code == 0, sound.output
    assert "It still holds" in sound.output
    assert "6 chunks, 100% of them preprocessed" in sound.output
    filled(model, kv_dir, SHORT[6:12], preprocessing="none")
    stale = calibrated(model, kv_dir, *options, "--check")
    assert stale.exit_code == 1
    assert "It may not hold any more: about 50% of the chunks are new" in stale.output


def test_each_tenant_and_preprocessing_has_its_own(model: str, tmp_path: Path) -> None:
    kv_dir = tmp_path / "kv"
    similar = {"preprocessing": "similar", "num_neighbours": 3}
    four = {**similar, "preprocessing_prompts": 4}
    found = {
        ("--tenant", "a", "--preprocessing", "none"): filled(
            model, kv_dir, SHORT[:4], tenant="a", preprocessing="none"
        ),
        ("--tenant", "b", "--preprocessing", "none"): filled(
            model, kv_dir, SHORT[4:7], tenant="b", preprocessing="none"
        ),
        ("--tenant", "a", "--num-neighbours", "3"): filled(model, kv_dir, SHORT[:4], tenant="a", **similar),
        ("--tenant", "a", "--num-neighbours", "3", "--preprocessing-prompts", "4"): filled(
            model, kv_dir, SHORT[:4], tenant="a", **four
        ),
        ("--tenant", "a", "--preprocessing", "fusionrag", "--num-neighbours", "2"): filled(
            model, kv_dir, SHORT[:4], tenant="a", preprocessing="fusionrag", num_neighbours=2
        ),
    }
    assert len(set(found.values())) == 5
    for number, (options, identity) in enumerate(found.items(), start=1):
        assert calibrated(model, kv_dir, *options, "--check").exit_code == 1, "that of another does not count"
        result = calibrated(model, kv_dir, *options)
        assert result.exit_code == 0, result.output
        assert len(list(kv_dir.glob("calibration-*.json"))) == len(list(kv_dir.glob("calibration-*.png"))) == number
        kept = json.loads((kv_dir / f"calibration-{identity[:16]}.json").read_text())
        assert kept["identity"] == identity
        assert kept["made_on"]["chunks"] == (3 if "b" in options else 4)
        assert kept["made_on"]["preprocessed"] == 1.0
    # Nobody else has any: a tenant without chunks is told so.
    other = calibrated(model, kv_dir, "--tenant", "c", "--preprocessing", "none")
    assert other.exit_code == 1
    assert "holds no chunk of this model" in other.output
    neighbours = calibrated(model, kv_dir, "--tenant", "a", "--num-neighbours", "2", "--check")
    assert neighbours.exit_code == 1
    assert "there is none" in neighbours.output
