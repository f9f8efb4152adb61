"""Every verdict, with real stores: each says what really became of a chunk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import PASSAGES, SHORT, rag_prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import CorpusError, FusedKVWarning
from fused_kv_llm.prompt import RawPrompt
from fused_kv_llm.report import Outcome, Verdict

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "preprocessing": "none",
    "store_misses": False,
    "prefix_cache_bytes": 0,
    "recompute_ratio": 0.2,
}
STORED = SHORT[:5]
MODEL = tiny_model()
SLOW = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


def opened(folder: Path, model: Any = MODEL, **options: Any) -> FusedKVEngine:
    return FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=folder, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    with opened(tmp_path_factory.mktemp("verdicts")) as made:
        made.build_kv_cache(STORED, progress=False)
        yield made


def only(verdicts: list[Verdict]) -> Verdict:
    (verdict,) = verdicts
    return verdict


def outcome(engine: FusedKVEngine, prompt: str, text: str) -> Outcome:
    return engine.explain(prompt, [text])[0].outcome


def test_reused(engine: FusedKVEngine) -> None:
    verdicts = engine.explain(rag_prompt(STORED[:2]), STORED[:2])
    assert [verdict.outcome for verdict in verdicts] == [Outcome.REUSED] * 2
    assert [verdict.chunk_id for verdict in verdicts] == [engine.chunk_id(text) for text in STORED[:2]]
    assert all(verdict.is_reused and not verdict.remedy and not verdict.diff for verdict in verdicts)


def test_at_ratio_one_nothing_counts_as_reused(engine: FusedKVEngine) -> None:
    verdict = only(engine.explain(rag_prompt(STORED[:1]), recompute_ratio=1.0))
    assert verdict.outcome is Outcome.RECOMPUTED
    assert "recompute_ratio" in verdict.remedy


@SLOW
@given(
    chunks=st.lists(st.sampled_from(SHORT[:8]), min_size=1, max_size=6),
    ratio=st.sampled_from([0.0, 0.3, 1.0]),
    repeated=st.booleans(),
)
def test_tokens_of_the_verdicts_are_those_of_the_report(
    engine: FusedKVEngine, chunks: list[str], ratio: float, repeated: bool
) -> None:
    prompt = rag_prompt(chunks + chunks[:1] * repeated)
    report = engine.generate(prompt, max_tokens=1, recompute_ratio=ratio, expected=chunks).report
    assert sum(verdict.tokens for verdict in report.verdicts) == report.reused_tokens + report.recomputed_tokens
    found = Outcome.RECOMPUTED if ratio == 1 else Outcome.REUSED
    wanted = [found if text in STORED else Outcome.NOT_INGESTED for text in dict.fromkeys(chunks)]
    assert [verdict.outcome for verdict in report.verdicts] == wanted


def test_tokens_of_a_prompt_that_ends_with_a_chunk(engine: FusedKVEngine) -> None:
    report = engine.generate(RawPrompt(STORED[0]), max_tokens=1).report
    assert only(report.verdicts).tokens == report.reused_tokens + report.recomputed_tokens > 0


def test_chunks_of_a_known_prefix_are_reused(tmp_path: Path) -> None:
    with opened(tmp_path, prefix_cache_bytes=2**26) as engine:
        engine.build_kv_cache(STORED, progress=False)
        prompt = rag_prompt(STORED[:3])
        first = engine.generate(prompt, max_tokens=1, recompute_ratio=0.0).report
        again = engine.generate(prompt, max_tokens=1, recompute_ratio=0.0, expected=STORED[:3]).report
    assert again.prefix_cache_tokens > 0
    assert [verdict.outcome for verdict in again.verdicts] == [Outcome.REUSED] * 3
    assert again.verdicts == first.verdicts


def test_without_expectations_there_are_the_chunks_that_were_found(engine: FusedKVEngine) -> None:
    report = engine.generate(rag_prompt([STORED[1], SHORT[7]]), max_tokens=1).report
    assert only(report.verdicts).text == STORED[1][:80]
    assert report.to_dict()["verdicts"][0]["outcome"] == "reused"


def test_not_ingested(engine: FusedKVEngine) -> None:
    verdict = only(engine.explain(rag_prompt([SHORT[7]]), [SHORT[7]]))
    assert (verdict.outcome, verdict.chunk_id, verdict.tokens) == (Outcome.NOT_INGESTED, None, 0)
    assert "build_kv_cache" in verdict.remedy


def test_a_check_without_a_prompt(engine: FusedKVEngine) -> None:
    assert engine.explain_text(f"  {STORED[0]}\n").outcome is Outcome.REUSABLE
    assert engine.explain_text(STORED[0]).tokens == len(engine.token_ids(STORED[0]))
    assert engine.explain_text(SHORT[7]).outcome is Outcome.NOT_INGESTED
    assert engine.explain_text("short").outcome is Outcome.TOO_SHORT


def test_a_check_finds_the_stored_form_of_a_text(engine: FusedKVEngine) -> None:
    other = STORED[2].replace(" ", "\n", 3)
    verdict = engine.explain_text(other)
    assert verdict.outcome is Outcome.RESPACED
    assert verdict.chunk_id == engine.chunk_id(STORED[2])
    assert verdict.diff.startswith("--- ingested\n+++ in the prompt\n")
    assert engine.explain_text(f"Seen: {STORED[2][:-40]}").outcome is Outcome.SHORTENED


@SLOW
@given(
    text=st.sampled_from(STORED),
    gaps=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["\n", "  ", "\t", "\u00a0", "\n\n  "])), min_size=1),
)
def test_what_is_respaced_is_diagnosed_as_respaced(
    engine: FusedKVEngine, text: str, gaps: list[tuple[int, str]]
) -> None:
    words = text.split(" ")
    spaces = dict(gaps)
    joined = "".join(word + spaces.get(number, " ") for number, word in enumerate(words)).strip()
    if text in joined:
        return
    verdict = engine.explain(rag_prompt([STORED[0], joined, STORED[1]]), [text])[0]
    if text in STORED[:2]:
        assert verdict.outcome is Outcome.REUSED
        return
    assert (verdict.outcome, verdict.chunk_id) == (Outcome.RESPACED, engine.chunk_id(text))
    assert verdict.diff


@pytest.mark.parametrize("written", [repr, lambda text: text.replace('"', "&quot;").replace("&", "&amp;")])
def test_escaped(tmp_path: Path, written: Any) -> None:
    text = STORED[3] + '\nIt is "called" R&D.'
    with opened(tmp_path) as engine:
        engine.build_kv_cache([text], progress=False)
        html = text.replace("&", "&amp;").replace('"', "&quot;")
        shown = repr([text]) if written is repr else html
        verdict = only(engine.explain(rag_prompt([shown]), [text]))
    assert verdict.outcome is Outcome.ESCAPED
    assert "+" in verdict.diff


def test_shortened(engine: FusedKVEngine) -> None:
    for left in (STORED[4][:120] + "...", "..." + STORED[4][90:], STORED[4][:60] + " [...] " + STORED[4][-60:]):
        assert outcome(engine, rag_prompt([left]), STORED[4]) is Outcome.SHORTENED


def test_rewritten(tmp_path: Path) -> None:
    text = PASSAGES[0]
    middle = len(text) // 2
    with opened(tmp_path) as engine:
        engine.build_kv_cache([text], progress=False)
        changed = f"{text[:middle]}XY{text[middle + 2 :]}"
        assert outcome(engine, rag_prompt([changed]), text) is Outcome.REWRITTEN


def test_not_in_the_prompt(engine: FusedKVEngine) -> None:
    assert outcome(engine, rag_prompt(STORED[:1]), STORED[4]) is Outcome.NOT_IN_PROMPT


def test_too_little_is_left_at_the_edges(tmp_path: Path) -> None:
    text = "antidisestablishmentarianismlike"
    with opened(tmp_path) as engine:
        engine.build_kv_cache([text], progress=False)
        assert engine.chunk_id(text) is not None
        assert len(engine.token_ids(text)) < 8
        report = engine.generate(rag_prompt([text]), max_tokens=1, expected=[text]).report
        assert [verdict.outcome for verdict in report.verdicts] == [Outcome.TOO_SHORT]
        assert engine.explain_text(text).outcome is Outcome.TOO_SHORT


def test_too_long(engine: FusedKVEngine) -> None:
    assert engine.explain_text("word " * 5000).outcome is Outcome.TOO_LONG


def test_overlap(tmp_path: Path) -> None:
    text = PASSAGES[1]
    whole, inner = text[:400], text[100:300].strip()
    with opened(tmp_path) as engine:
        engine.build_kv_cache([whole, inner], progress=False)
        verdicts = engine.explain(rag_prompt([whole]), [whole, inner])
        assert [verdict.outcome for verdict in verdicts] == [Outcome.REUSED, Outcome.OVERLAP]
        # The inner one by itself is found.
        assert outcome(engine, rag_prompt([inner]), inner) is Outcome.REUSED


def test_evicted_and_deleted(tmp_path: Path) -> None:
    with opened(tmp_path) as engine:
        engine.build_kv_cache(STORED[:2], progress=False)
        engine.store.evict(0)
        engine.build_kv_cache(STORED[2:3], progress=False)
        engine.delete_chunks(STORED[2:3])
        prompt = rag_prompt(STORED[:3])
        verdicts = engine.explain(prompt, STORED[:3])
        assert [verdict.outcome for verdict in verdicts] == [Outcome.EVICTED, Outcome.EVICTED, Outcome.DELETED]
        assert engine.explain_text(STORED[2]).outcome is Outcome.DELETED
        engine.build_kv_cache(STORED[:1], progress=False)
        assert outcome(engine, prompt, STORED[0]) is Outcome.REUSED
    with opened(tmp_path) as again:
        assert outcome(again, prompt, STORED[1]) is Outcome.EVICTED


@pytest.mark.parametrize("expected", [(), STORED[:2]])
@pytest.mark.parametrize("hurt", ["header", "tensors", "gone"])
def test_damaged(tmp_path: Path, hurt: str, expected: list[str]) -> None:
    with opened(tmp_path, memory_bytes=0) as engine:
        engine.build_kv_cache(STORED[:2], progress=False)
        key = engine.chunk_id(STORED[0])
        (file,) = [path for path in (tmp_path / "chunks").rglob("*") if path.is_file() and path.name.startswith(key)]
        data = bytearray(file.read_bytes())
        data[5 if hurt == "header" else -5] ^= 255
        if hurt == "gone":
            file.unlink()
        else:
            file.write_bytes(data)
        with pytest.warns(FusedKVWarning):
            report = engine.generate(rag_prompt(STORED[:2]), max_tokens=1, expected=expected).report
        became = {verdict.text: verdict.outcome for verdict in report.verdicts}
        assert became == {STORED[0][:80]: Outcome.DAMAGED, STORED[1][:80]: Outcome.REUSED}
        assert report.chunks_missed == 1
        assert sum(verdict.tokens for verdict in report.verdicts) == report.reused_tokens + report.recomputed_tokens
        assert engine.explain_text(STORED[0]).outcome is Outcome.DAMAGED


@pytest.mark.parametrize(
    ("options", "word"),
    [({"wrap_chat_template": False}, "chat template"), ({"kv_dtype": "float16"}, "kv_dtype"), ({"seed": 1}, "model")],
)
def test_other_settings(tmp_path: Path, options: dict[str, Any], word: str) -> None:
    model = tiny_model(seed=options.pop("seed")) if "seed" in options else tiny_model()
    with opened(tmp_path, model, **options) as other:
        other.build_kv_cache(STORED[:1], progress=False)
    with opened(tmp_path) as engine:
        verdict = only(engine.explain(rag_prompt(STORED[:1]), STORED[:1]))
        assert verdict.outcome is Outcome.OTHER_SETTINGS
        assert f"another {word} (" in verdict.detail
        assert engine.explain_text(STORED[1]).outcome is Outcome.NOT_INGESTED


def test_other_tenants_are_told_to_operators_only(tmp_path: Path) -> None:
    with opened(tmp_path, tenant="first") as first, opened(tmp_path, tenant="second") as second:
        first.build_kv_cache(STORED[:1], progress=False)
        first.build_kv_cache(STORED[1:2], progress=False)
        first.delete_chunks(STORED[1:2])
        prompt = rag_prompt(STORED[:2])
        told = second.explain(prompt, STORED[:2], operator=True)
        assert [verdict.outcome for verdict in told] == [Outcome.OTHER_TENANT, Outcome.NOT_INGESTED]
        never_seen = [Outcome.NOT_INGESTED] * 2
        assert [verdict.outcome for verdict in second.explain(prompt, STORED[:2])] == never_seen
        report = second.generate(prompt, max_tokens=1, expected=STORED[:2]).report
        assert [verdict.outcome for verdict in report.verdicts] == never_seen
        # Word for word what is said of a text that nobody has.
        (nobody,) = second.explain(rag_prompt([SHORT[7]]), [SHORT[7]])
        for verdict in (*report.verdicts, second.explain_text(STORED[0])):
            assert (verdict.detail, verdict.remedy, verdict.chunk_id) == (nobody.detail, nobody.remedy, None)
    assert "first" not in repr(told)
    assert b"first" not in (tmp_path / "index.sqlite").read_bytes()


def test_hostile_texts_take_no_seconds(engine: FusedKVEngine) -> None:
    prompt = rag_prompt(STORED[:1])
    for text in ("a" * 10**6, "\n" * 10**6 + "x", "ab " * 350_000, STORED[1] * 4000):
        began = time.thread_time()
        assert not engine.explain_text(text).is_reused
        assert not engine.explain(prompt, [text])[0].is_reused
        assert time.thread_time() - began < 2


def test_one_string_is_refused(engine: FusedKVEngine) -> None:
    with pytest.raises(CorpusError, match="is one string"):
        engine.explain(rag_prompt(STORED[:1]), STORED[0])
    with pytest.raises(CorpusError, match="is one string"):
        engine.submit(rag_prompt(STORED[:1]), expected=STORED[0])
