"""Equation 13 of Cache-Craft: the smallest alpha whose quality is good enough, kept and used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from typer.testing import CliRunner

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.cli import app
from fused_kv_llm.engine.calibration import calibration_path
from fused_kv_llm.errors import ConfigError, CorpusError
from fused_kv_llm.selectors import CacheCraft
from fused_kv_llm.tuning.alpha_profile import AlphaPoint, _choose, profile_alpha
from fused_kv_llm.tuning.confidence import lower_bound

QUESTIONS = ["How many passengers can the Aldebaran carry?", "When does the ferry sail?"]


def make_engine(folder: Path, **options: object) -> FusedKVEngine:
    options = {"preprocessing": "none", "store_misses": False, "variants": 2, **options}
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)  # type: ignore[arg-type]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        yield engine


def learn(engine: FusedKVEngine) -> None:
    engine.generate(rag_prompt(SHORT[:4]), max_tokens=1, recompute_ratio=1.0)
    engine.wait_for_background()


def test_alpha_is_the_smallest_overhead_that_is_shown_to_be_good_enough() -> None:
    points = [
        AlphaPoint(0.25, [0.9, 0.7] * 50, [0.1, 0.3]),
        AlphaPoint(0.5, [0.98, 1.0] * 50, [0.2, 0.5]),
        AlphaPoint(1.0, [1.0, 1.0] * 50, [0.4, 1.0]),
    ]
    for target, alpha in ((0.95, 0.5), (0.75, 0.25)):
        point, bound = _choose(points, target, 0.95)
        assert point is not None
        assert (point.alpha, bound) == (alpha, lower_bound(point.agreements, 0.95))
        assert target <= bound < point.agreement
    assert _choose(points[:1], 0.95, 0.95) == (None, 1.0), "full prefill is always good enough"
    few = [AlphaPoint(0.5, [1.0, 1.0], [0.2])]
    assert _choose(few, 0.95, 0.95) == (None, 1.0), "two questions show little"


def test_overheads_are_those_of_the_recorded_prefixes_and_auto_uses_alpha(
    engine: FusedKVEngine, tmp_path: Path
) -> None:
    learn(engine)
    variants = engine.corpus.variants
    assert variants is not None
    stored = variants.usage()
    profile = profile_alpha(engine, QUESTIONS, alphas=[2.0, 0.5, 1.0], target_agreement=0.01, num_chunks=3)
    engine.wait_for_background()
    assert variants.usage() == stored, "its own prompts leave nothing behind which they would cost nothing"
    assert [point.alpha for point in profile.points] == [0.5, 1.0, 2.0]
    half, whole, double = profile.points
    assert len(whole.overheads) == 3 * len(QUESTIONS)
    # Equation 12: what is not cut off at 1 grows with alpha; a prompt's first chunk may cost nothing.
    for one, two in zip(half.overheads, whole.overheads, strict=True):
        assert one == pytest.approx(two / 2, abs=1e-4)
    assert double.mean_overhead > whole.mean_overhead > half.mean_overhead > 0
    assert profile.chosen.alpha == 0.5
    kept = json.loads(calibration_path(tmp_path, engine.fusion_identity).read_bytes())
    assert (kept["selector"], kept["alpha"]) == ("cache_craft", 0.5)
    with make_engine(tmp_path, recompute_ratio="auto") as again:
        assert again._selector == CacheCraft(alpha=0.5)
    learn(engine)
    engine.generate(rag_prompt(SHORT[2:6]), max_tokens=1)
    engine.wait_for_background()
    assert variants.usage() > stored, "later prompts leave variants again"


def test_what_has_no_records_is_refused(engine: FusedKVEngine, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no variant of a chunk yet"):
        profile_alpha(engine, QUESTIONS)
    with pytest.raises(ConfigError, match=r"alphas=\[0\]"):
        profile_alpha(engine, QUESTIONS, alphas=[0])
    with make_engine(tmp_path, variants=0) as plain, pytest.raises(ConfigError, match="variants=0"):
        profile_alpha(plain, QUESTIONS)


def test_a_calibration_with_an_alpha_of_another_selector_is_refused(engine: FusedKVEngine) -> None:
    kept = {"identity": engine.fusion_identity, "recompute_ratio": 0.5, "selector": "boundary", "agreement": 1.0,
            "target_agreement": 0.9, "questions": 1, "alpha": 2.0}  # fmt: skip
    calibration_path(Path(engine.store.kv_dir), engine.fusion_identity).write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match="is cache_craft's, not 'boundary'"):
        engine.generate(rag_prompt(SHORT[:2]), max_tokens=1, recompute_ratio="auto")


def test_the_command_refuses_a_folder_without_a_store(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "alpha", "--kv-dir", str(tmp_path / "none")])
    assert result.exit_code != 0
    assert "no KV store" in " ".join(result.output.split())
