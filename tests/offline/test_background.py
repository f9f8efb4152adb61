"""The second pass of ingestion: beside requests, in the foreground, stopped, killed, continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_PREPROCESSING_PROMPTS
from fused_kv_llm.context_shift import shift_name
from fused_kv_llm.errors import ConfigError, MissingExtraError, StoreFullError
from fused_kv_llm.model import StoppedError
from fused_kv_llm.offline import BackgroundWork
from fused_kv_llm.offline.prompt_prefill import PromptPrefill

SHIFT = shift_name(3, DEFAULT_PREPROCESSING_PROMPTS)
TEXTS = SHORT[:12]
GRAPH = {text: [other for other in TEXTS if other != text][:3] for text in TEXTS}
FOURS = {text: [o for o in TEXTS[n // 4 * 4 : n // 4 * 4 + 4] if o != text] for n, text in enumerate(TEXTS)}
"""Three groups of four chunks."""


def make_engine(folder: Path, **options: object) -> FusedKVEngine:
    options = {"num_neighbours": 3, "store_misses": False, **options}
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)  # type: ignore[arg-type]


def preprocessed(engine: FusedKVEngine) -> int:
    return sum(engine.store.sidecars.has(str(engine.chunk_id(text)), SHIFT) for text in engine.stored_texts())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The second pass waits before each prompt until it is let go."""
    gate, real = threading.Event(), PromptPrefill.true_kv

    def gated(*arguments: Any) -> object:
        stopped = arguments[-1]
        while not gate.wait(0.01):
            if stopped():
                raise StoppedError
        return real(*arguments)

    monkeypatch.setattr(PromptPrefill, "true_kv", gated)
    return gate.set


def test_chunks_can_be_asked_about_before_they_are_preprocessed(tmp_path: Path, slow: Callable[[], None]) -> None:
    with make_engine(tmp_path) as engine:
        report = engine.build_kv_cache(TEXTS, neighbours=GRAPH, progress=False)
        assert (report.chunks_new, report.chunks_preprocessed, report.chunks_pending) == (12, 0, 12)
        assert "12 not preprocessed yet" in report.summary()
        before, found = engine.prefill(rag_prompt(TEXTS[:4]), recompute_ratio=0.0)
        assert found.chunks_found == 4
        assert "context_shift" not in found.sidecar_bytes_loaded
        slow()
        engine.wait_for_background()
        after, found = engine.prefill(rag_prompt(TEXTS[:4]), recompute_ratio=0.0)
        assert found.sidecar_bytes_loaded["context_shift"] > 0
        assert not torch.allclose(before.logits, after.logits, atol=1e-3)
        assert engine.build_kv_cache(TEXTS, neighbours=GRAPH, preprocess="wait", progress=False).chunks_pending == 0


def test_later_means_at_a_later_call(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        report = engine.build_kv_cache(TEXTS, neighbours=GRAPH, preprocess="later", progress=False)
        engine.wait_for_background()
        assert (report.chunks_pending, preprocessed(engine)) == (12, 0)
        report = engine.build_kv_cache(TEXTS[:1], preprocess="wait", progress=False)
        assert (report.chunks_new, report.chunks_preprocessed, report.chunks_pending) == (0, 12, 0)
        counters = engine.store.counters()
        assert (sum(counters.hits.values()), counters.misses) == (0, 0), "only requests use chunks"
        with pytest.raises(ConfigError, match="preprocess='soon' is unknown"):
            engine.build_kv_cache(TEXTS, preprocess="soon", progress=False)  # type: ignore[arg-type]


def test_closing_stops_at_the_next_batch_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, fourth = PromptPrefill.true_kv, threading.Event()
    prompts = []

    def counting(*arguments: Any) -> object:
        prompts.append(time.monotonic())
        if len(prompts) == 4:
            fourth.set()
            time.sleep(0.2)
        return real(*arguments)

    monkeypatch.setattr(PromptPrefill, "true_kv", counting)
    engine = make_engine(tmp_path)
    engine.build_kv_cache(TEXTS, neighbours=FOURS, progress=False)
    assert fourth.wait(30)
    engine.close()
    assert len(prompts) == 4, "the prompt under way is the last one: a group has two"
    assert not any(thread.name == "fused-kv-background" for thread in threading.enumerate())
    monkeypatch.undo()
    with make_engine(tmp_path) as engine:
        done = preprocessed(engine)
        assert done == 4, "the first group is stored, and of the second one nothing"
        report = engine.build_kv_cache(TEXTS, neighbours=FOURS, preprocess="wait", progress=False)
        assert report.chunks_preprocessed == 12 - done
        engine.close()
        engine.corpus.close()


def test_there_is_progress_however_often_the_pass_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=FOURS, preprocess="later", progress=False)
        asked = []

        def interrupted(_: BackgroundWork) -> bool:
            # Without progress it would be asked for ever.
            asked.append(1)
            return len(asked) < 500

        monkeypatch.setattr(BackgroundWork, "_is_interrupted", interrupted)
        engine.preprocess()
        engine.wait_for_background()
        assert preprocessed(engine) == 12
        assert len(asked) < 500


def test_a_killed_pass_goes_on_where_it_was(tmp_path: Path) -> None:
    """It repeats at most the group whose chunks were being written."""
    script = tmp_path / "ingest.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from corpus import SHORT
        from models import smollm2_tokenizer, tiny_model
        from fused_kv_llm import FusedKVEngine
        from fused_kv_llm.offline import preprocess
        shift = preprocess._shift
        def slow(fit):
            print("chunk", flush=True)
            time.sleep(0.2)
            return shift(fit)
        preprocess._shift = slow
        texts = SHORT[:12]
        graph = {{text: [other for other in texts if other != text][:3] for text in texts}}
        engine = FusedKVEngine(
            tiny_model(), tokenizer=smollm2_tokenizer(), num_neighbours=3, kv_dir={str(tmp_path / "kv")!r}
        )
        engine.build_kv_cache(texts, neighbours=graph, preprocess="wait", progress=False)
        """)
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(6):
        assert process.stdout.readline().strip() == "chunk", process.communicate()[1]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    with make_engine(tmp_path / "kv") as engine:
        assert len(engine.stored_texts()) == 12, "the first pass was through"
        done = preprocessed(engine)
        # Five chunks were written before the sixth was announced.
        assert 4 <= done <= 6
        report = engine.build_kv_cache(TEXTS, preprocess="wait", progress=False)
        assert (report.chunks_new, report.chunks_stale) == (0, 0)
        # A shift is written before the neighbours it was made with, so the last one may be made again.
        assert 12 - done <= report.chunks_preprocessed <= 12 - done + 1
        assert preprocessed(engine) == 12
        assert engine.store.check().findings == []


def test_what_ends_the_pass_is_raised_to_who_waits_and_logged_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(tmp_path) as engine:

        def full(*_: object, **__: object) -> int:
            raise StoreFullError("the disk is full")

        monkeypatch.setattr(engine.store.sidecars, "put", full)
        with pytest.raises(StoreFullError, match="the disk is full"):
            engine.build_kv_cache(TEXTS, neighbours=GRAPH, preprocess="wait", progress=False)
        assert "the next build_kv_cache goes on" in caplog.text
        monkeypatch.undo()
        assert engine.build_kv_cache(TEXTS, preprocess="wait", progress=False).chunks_preprocessed == 12


def test_a_thread_that_cannot_be_started_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=GRAPH, preprocess="later", progress=False)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            engine.preprocess(progress=False)
        monkeypatch.undo()
        engine.wait_for_background()
        assert engine.preprocess(progress=False).chunks_preprocessed == 12


def test_missing_packages_are_known_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(tmp_path) as engine:
        monkeypatch.setattr("fused_kv_llm.offline.neighbour_graph.find_spec", lambda name: None)
        with pytest.raises(MissingExtraError, match="faiss"):
            engine.build_kv_cache(TEXTS, progress=False)
        assert engine.store.stats().chunks == 0


def test_a_chunk_that_is_deleted_meanwhile_is_passed_over(tmp_path: Path, slow: Callable[[], None]) -> None:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=GRAPH, progress=False)
        engine.delete_chunks(TEXTS[:2])
        slow()
        engine.wait_for_background()
        assert len(engine.stored_texts()) == preprocessed(engine) == 10


def test_chunks_that_come_meanwhile_are_preprocessed_too(tmp_path: Path, slow: Callable[[], None]) -> None:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(TEXTS[:6], neighbours=GRAPH, progress=False)
        engine.build_kv_cache(TEXTS[6:], neighbours=GRAPH, progress=False)
        slow()
        engine.wait_for_background()
        assert preprocessed(engine) == 12


def test_missed_chunks_are_ingested_first_and_preprocessed(tmp_path: Path, slow: Callable[[], None]) -> None:
    with make_engine(tmp_path, store_misses=True) as engine:
        engine.build_kv_cache(TEXTS[:6], neighbours=GRAPH, progress=False)
        engine.prefetch(SHORT[20:21])
        engine.generate(rag_prompt(SHORT[20:21]), max_tokens=1)
        deadline = time.monotonic() + 30
        while engine.chunk_id(SHORT[20]) is None:
            assert time.monotonic() < deadline, "preprocessing does not hold it up"
            time.sleep(0.02)
        assert preprocessed(engine) == 0
        slow()
        engine.wait_for_background()
        assert preprocessed(engine) == 7


def test_both_passes_show_their_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As lines, since the output is no terminal."""
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=GRAPH, preprocess="wait", progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["Prefilling chunks"] * 2 + ["Preprocessing chunks"] * 2
    assert lines[0].startswith("Prefilling chunks: 12 chunks, ")
    assert "12/12" in lines[1]
    assert "12/12" in lines[3]
