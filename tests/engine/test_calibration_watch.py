"""``recompute_ratio="auto"`` says when its calibration was made on another corpus than there is now."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import PASSAGES, SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine, FusedKVWarning
from fused_kv_llm.engine import CorpusState, calibration_path
from fused_kv_llm.engine import calibration_watch as watching
from fused_kv_llm.engine.corpus_state import corpus_changes
from fused_kv_llm.selectors import resolve_selector
from fused_kv_llm.tuning import calibrate

MODEL = tiny_model()
QUESTIONS = ["How many passengers can the Aldebaran carry?"]


def make_engine(folder: Path, **options: Any) -> FusedKVEngine:
    options = {"preprocessing": "none", "store_misses": False, **options}
    return FusedKVEngine(MODEL, tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:10], progress=False)
        calibrate(engine, QUESTIONS, ratios=(0.3,), num_chunks=2, answer_tokens=1)
        yield engine


@pytest.fixture(autouse=True)
def looking_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_LOOK_EVERY_S", 0.0)


def asked(engine: FusedKVEngine, **options: Any) -> list[str]:
    """Return what the report and Python's warnings say of a calibration, which has to be the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = engine.generate(rag_prompt(SHORT[:2]), max_tokens=1, **options).report
    told = [warning for warning in report.warnings if "calibrate" in warning]
    assert told == [str(one.message) for one in caught if issubclass(one.category, FusedKVWarning)]
    return told


def test_nothing_is_said_while_the_corpus_stays_as_it_was(engine: FusedKVEngine) -> None:
    assert asked(engine, recompute_ratio="auto") == []
    engine.build_kv_cache(SHORT[10:12], progress=False)
    assert engine.calibration_changes() == [], "a sixth of the chunks is new"
    assert asked(engine, recompute_ratio="auto") == []


def test_new_chunks_are_noticed_and_said_once(engine: FusedKVEngine) -> None:
    engine.build_kv_cache(SHORT[10:15], progress=False)
    assert asked(engine, recompute_ratio=0.3) == [], "this request does not rest on it"
    (told,) = asked(engine, recompute_ratio="auto")
    assert "about 33% of the chunks are new" in told
    assert "fused-kv calibrate --kv-dir" in told
    assert asked(engine, recompute_ratio="auto") == []
    _, report = engine.prefill(rag_prompt(SHORT[:2]), recompute_ratio="auto")
    assert not report.warnings


def test_an_engine_made_with_auto_and_the_caller_of_prefill_are_told_too(engine: FusedKVEngine, tmp_path: Path) -> None:
    engine.delete_chunks(SHORT[:3])
    with make_engine(tmp_path, recompute_ratio="auto") as other:
        (told,) = asked(other)
        assert "about 30% of its chunks are gone" in told
    with pytest.warns(FusedKVWarning, match="are gone"):
        _, report = engine.prefill(rag_prompt(SHORT[4:6]), recompute_ratio="auto")
    assert len([warning for warning in report.warnings if "are gone" in warning]) == 1


def test_it_looks_once_a_minute(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_LOOK_EVERY_S", 60.0)
    looks: list[int] = []
    read = watching.read_corpus_state
    monkeypatch.setattr(watching, "read_corpus_state", lambda *args: looks.append(1) or read(*args))
    for _ in range(3):
        assert asked(engine, recompute_ratio="auto") == []
    assert len(looks) == 1


def test_a_new_calibration_is_looked_at_anew(engine: FusedKVEngine) -> None:
    engine.build_kv_cache(SHORT[10:15], progress=False)
    assert asked(engine, recompute_ratio="auto")
    calibrate(engine, QUESTIONS, ratios=(0.3,), num_chunks=2, answer_tokens=1)
    assert asked(engine, recompute_ratio="auto") == []
    engine.delete_chunks(SHORT[:6])
    (told,) = asked(engine, recompute_ratio="auto")
    assert "are gone" in told


def test_the_second_pass_is_noticed(tmp_path: Path) -> None:
    with make_engine(tmp_path, preprocessing="similar", num_neighbours=3) as engine:
        engine.build_kv_cache(SHORT[:6], preprocess="later", progress=False)
        calibrate(engine, QUESTIONS, ratios=(0.3,), num_chunks=2, answer_tokens=1)
        assert asked(engine, recompute_ratio="auto") == []
        engine.preprocess(progress=False)
        (told,) = asked(engine, recompute_ratio="auto")
        assert "about 100% of the chunks are preprocessed, and 0% were then" in told
        with pytest.raises(Exception, match="there is none"):
            make_engine(tmp_path, recompute_ratio="auto")


def test_another_rule_another_release_and_old_files_are_noticed(engine: FusedKVEngine) -> None:
    path = calibration_path(engine.store.kv_dir, engine.fusion_identity)
    kept = json.loads(path.read_text())
    rule = kept["made_on"]["rule"]
    assert rule.startswith("SinkAttention(weight=")
    for change, said in (
        ({"rule": rule.replace("weight=8.0", "weight=2.0")}, "the rule was SinkAttention\\(weight=2.0"),
        ({"library": "0.1.9"}, "by version 0.1.9 of the library"),
    ):
        path.write_text(json.dumps({**kept, "made_on": {**kept["made_on"], **change}}))
        with pytest.warns(FusedKVWarning, match=said):
            engine.generate(rag_prompt(SHORT[:2]), max_tokens=1, recompute_ratio="auto")
    old = {name: kept[name] for name in ("identity", "recompute_ratio", "selector", "agreement", "target_agreement",
                                         "questions")}  # fmt: skip
    path.write_text(json.dumps(old))
    with pytest.warns(FusedKVWarning, match="does not say what it was made on"):
        engine.generate(rag_prompt(SHORT[:2]), max_tokens=1, recompute_ratio="auto")


def test_a_sample_of_a_large_corpus_tells_how_much_of_it_changed() -> None:
    """Keys are hashes: those below a certain one are a sample, whatever comes and goes."""

    class Store:
        """Keeps keys and nothing else."""

        def __init__(self, keys: list[str]) -> None:
            self.held = sorted(keys)

        def keys(self, identity: str) -> list[str]:
            return self.held

        def keys_up_to(self, identity: str, key: str) -> list[str]:
            return [one for one in self.held if one <= key]

    from hashlib import sha256

    from fused_kv_llm.engine.corpus_state import read_corpus_state

    keys = [sha256(str(number).encode()).hexdigest() for number in range(20_000)]
    rule = resolve_selector("boundary")

    def state(held: list[str], then: CorpusState | None = None) -> CorpusState:
        return read_corpus_state(Store(held), "one", None, rule, then)  # type: ignore[arg-type]

    then = state(keys[:10_000])
    assert (then.chunks, len(then.sample)) == (10_000, 256)
    assert corpus_changes(then, state(keys[:11_000], then)) == []
    (told,) = corpus_changes(then, state(keys[:15_000], then))
    assert 26 <= int(told.split()[1].rstrip("%")) <= 40
    assert 13_500 < state(keys[:15_000], then).chunks < 16_500
    (told,) = corpus_changes(then, state(keys[5_000:10_000], then))
    assert 42 <= int(told.split()[1].rstrip("%")) <= 58


def test_tenants_have_calibrations_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither chunks nor questions of another tenant get into one, and vectors are remembered for each apart."""
    salted: list[str] = []
    from fused_kv_llm.offline import questions as searching

    vectors = searching.corpus_vectors
    monkeypatch.setattr(
        searching, "corpus_vectors", lambda *args, tenant: salted.append(tenant) or vectors(*args, tenant=tenant)
    )
    with make_engine(tmp_path, tenant="ours") as ours, make_engine(tmp_path, tenant="theirs") as theirs:
        ours.build_kv_cache(PASSAGES[:4], progress=False)
        theirs.build_kv_cache(PASSAGES[4:9], progress=False)
        prompts: list[str] = []
        generate = ours.generate
        monkeypatch.setattr(
            ours, "generate", lambda prompt, **options: prompts.append(str(prompt)) or generate(prompt, **options)
        )
        found = calibrate(ours, ratios=(0.3,), num_questions=3, num_chunks=3, answer_tokens=1)
        assert found.chosen.questions == 3
        assert prompts
        assert not [text for text in PASSAGES[4:9] for prompt in prompts if text in prompt]
        assert any(text in prompt for text in PASSAGES[:4] for prompt in prompts)
        assert salted == ["ours"]
        assert found.chosen.made_on is not None
        assert found.chosen.made_on.chunks == 4
        with pytest.raises(Exception, match="needs a calibration of this model on this store, but there is none"):
            theirs.calibration()
        calibrate(theirs, QUESTIONS, ratios=(0.3,), num_chunks=3, answer_tokens=1)
        assert (theirs.calibration().made_on or found.chosen.made_on).chunks == 5
        assert ours.calibration() == found.chosen
        # What one tenant adds is no change for the other.
        theirs.build_kv_cache(PASSAGES[9:16], progress=False)
        assert ours.calibration_changes() == []
        assert theirs.calibration_changes() != []
    assert len(list(tmp_path.glob("calibration-*.json"))) == 2
    for kept in tmp_path.glob("calibration-*.json"):
        assert not [text for text in PASSAGES[:16] if text[:20] in kept.read_text()]
