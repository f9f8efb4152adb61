"""Ingestion: what is skipped, what is resumed, what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from corpus import PASSAGES, SHORT, rag_prompt
from hypothesis import given
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine, FusedKVWarning
from fused_kv_llm.errors import CorpusError, StoreFullError
from fused_kv_llm.offline.batches import PendingChunk, batches, walk_neighbours
from fused_kv_llm.offline.prefill import Ingestor
from fused_kv_llm.offline.writer import BackgroundWriter


def make_engine(folder: Path, **options: object) -> FusedKVEngine:
    options = {"preprocessing": "none", **options}
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)  # type: ignore[arg-type]


@given(lengths=st.lists(st.integers(1, 300), max_size=40), limit=st.integers(1, 1000))
def test_batches_hold_every_chunk_once_within_the_limit(lengths: list[int], limit: int) -> None:
    chunks = [PendingChunk(str(i), "", tuple(range(n))) for i, n in enumerate(lengths)]
    found = list(batches(chunks, lambda: limit, {}, 0))
    assert [c.key for b in found for c in b] == [c.key for c in chunks]
    for batch in found:
        assert len(batch) == 1 or sum(len(c.token_ids) for c in batch) <= limit


@given(contexts=st.lists(st.sets(st.integers(0, 9), max_size=4), min_size=1, max_size=10), limit=st.integers(1, 40))
def test_contexts_of_a_batch_fit_together(contexts: list[set[int]], limit: int) -> None:
    sizes = {str(i): i + 1 for i in range(10)}
    chunks = [PendingChunk(str(i), str(i), (1,), (tuple(map(str, sorted(c - {i}))),)) for i, c in enumerate(contexts)]
    ordered = walk_neighbours(chunks)
    assert sorted(c.key for c in ordered) == sorted(c.key for c in chunks)
    found = list(batches(ordered, lambda: 100, sizes, limit))
    assert [c for b in found for c in b] == ordered
    for batch in found:
        together = {text for chunk in batch for text in chunk.neighbours}
        assert len(batch) == 1 or sum(sizes[text] for text in together) <= limit


def test_chunks_that_share_neighbours_come_close_together() -> None:
    """Two separate groups, given in turns, come one after the other."""
    chunks = [
        PendingChunk(f"{g}{i}", "", (1,), (tuple(f"{g}{j}" for j in range(4) if j != i),))
        for i in range(4)
        for g in "ab"
    ]
    assert "".join(chunk.key[0] for chunk in walk_neighbours(chunks)) == "aaaabbbb"


def test_summary_counts_everything(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        texts = [SHORT[0], SHORT[1], "  " + SHORT[0] + "\n", "", "   ", "too short"]
        first = engine.build_kv_cache(texts, progress=False)
        assert (first.chunks_total, first.chunks_new, first.chunks_duplicate, first.chunks_skipped) == (
            6,
            2,
            1,
            3,
        )
        assert first.bytes_written > first.tokens * engine.loaded.geometry.kv_bytes_per_token(torch.float32)
        second = engine.build_kv_cache(texts, progress=False)
        assert (second.chunks_new, second.chunks_present, second.tokens) == (0, 2, 0)
        assert "2 already stored" in second.summary()


def test_batched_kv_equals_kv_of_the_chunk_alone(tmp_path: Path) -> None:
    """Padding and batch neighbours leave no trace."""
    with make_engine(tmp_path / "batch") as batched, make_engine(tmp_path / "alone") as alone:
        batched.build_kv_cache([PASSAGES[0], SHORT[1], SHORT[2]], progress=False)
        alone.build_kv_cache([SHORT[1]], progress=False)
        key, token_ids = alone.chunk_id(SHORT[1]), tuple(alone.token_ids(SHORT[1]))
        assert key is not None
        stored = [e.store.open(key, token_ids) for e in (batched, alone)]
        kv = [s.read_layers(0, 3) for s in stored if s is not None]
        assert len(kv) == 2
        for got, want in zip(*kv, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_an_empty_corpus_is_an_error(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine, pytest.raises(CorpusError, match="corpus is empty"):
        engine.build_kv_cache([], progress=False)


def test_something_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine, pytest.raises(CorpusError, match="type int, not text"):
        engine.build_kv_cache([SHORT[0], 3], progress=False)  # type: ignore[list-item]


def test_an_empty_document_is_skipped_and_said(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        assert "1 skipped (empty or too short" in engine.build_kv_cache(["\n"], progress=False).summary()


def test_a_chunk_longer_than_the_context_is_skipped_with_a_warning(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        long = "ferry " * 3000
        with pytest.warns(
            FusedKVWarning, match=r"skipped: its \d+ tokens do not fit in the model's context.*; split it"
        ):
            report = engine.build_kv_cache([long, SHORT[0]], progress=False)
        assert (report.chunks_new, report.chunks_skipped) == (1, 1)


def test_text_that_cannot_be_encoded_is_skipped_with_a_warning(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        with pytest.warns(FusedKVWarning, match="skipped"):
            report = engine.build_kv_cache(
                ["a lone surrogate \ud800 in a chunk that is long enough", SHORT[0]], progress=False
            )
        assert (report.chunks_new, report.chunks_skipped) == (1, 1)


def test_it_refuses_before_computing_when_the_disk_cannot_hold_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(tmp_path) as engine:
        monkeypatch.setattr(engine.store, "free_bytes", lambda spare_bytes: 1000)
        monkeypatch.setattr(Ingestor, "_prefill", lambda *_: pytest.fail("computed although the disk is full"))
        with pytest.raises(StoreFullError, match=r"Nothing was written: free some space"):
            engine.build_kv_cache(SHORT[:2], progress=False)


def test_a_disk_that_fills_up_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tmp_path) as engine:
        put, calls = engine.store.put, []

        def failing(*args: object, **named: object) -> int:
            calls.append(args)
            if len(calls) > 2:
                raise StoreFullError("the disk is full")
            return put(*args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(engine.store, "put", failing)
        with pytest.raises(StoreFullError, match="the disk is full"):
            engine.build_kv_cache(SHORT[:6], progress=False)
        monkeypatch.undo()
        report = engine.build_kv_cache(SHORT[:6], progress=False)
        assert (report.chunks_present, report.chunks_new) == (2, 4)


def test_ctrl_c_keeps_what_was_computed_and_the_next_run_resumes(tmp_path: Path) -> None:
    script = tmp_path / "ingest.py"
    script.write_text(
        textwrap.dedent(f"""
        import signal, sys, time
        # A shell's background jobs ignore the signal, and so would their children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from corpus import SHORT
        from models import smollm2_tokenizer, tiny_model
        from fused_kv_llm import FusedKVEngine
        from fused_kv_llm.offline import prefill as first_pass
        first_pass.BATCH_TOKENS = 1
        prefill = first_pass.Ingestor._prefill
        def slow(self, batch):
            print("batch", flush=True)
            time.sleep(0.2)
            return prefill(self, batch)
        first_pass.Ingestor._prefill = slow
        engine = FusedKVEngine(
            tiny_model(), tokenizer=smollm2_tokenizer(), preprocessing="none", kv_dir={str(tmp_path / "kv")!r}
        )
        engine.build_kv_cache(SHORT[:20], progress=False)
        """)
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(4):
        assert process.stdout.readline().strip() == "batch"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    with make_engine(tmp_path / "kv") as engine:
        report = engine.build_kv_cache(SHORT[:20], progress=False)
        assert report.chunks_present >= 3
        assert report.chunks_present + report.chunks_new == 20
        _, fused = engine.prefill(rag_prompt(SHORT[:5]))
        assert fused.chunks_found == 5


def test_two_engines_ingest_the_same_corpus_at_once(tmp_path: Path) -> None:
    with make_engine(tmp_path) as one, make_engine(tmp_path) as two:
        threads = [
            threading.Thread(target=e.build_kv_cache, args=(SHORT[:8],), kwargs={"progress": False}) for e in (one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.store.stats().chunks == 8
        assert len(list(tmp_path.rglob("*.safetensors"))) == 8


def test_the_writer_hands_errors_to_the_submitting_thread() -> None:
    def broken(item: str) -> None:
        raise OSError("no such device")

    writer = BackgroundWriter(broken)
    writer.submit("anything")
    with pytest.raises(OSError, match="no such device"):
        writer.close()


def test_progress_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:3], progress=True)
    shown = capsys.readouterr().out
    assert "Prefilling chunks" in shown
    assert "3/3" in shown
    assert "tokens/s" in shown


def test_misses_are_ingested_in_the_background(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:2], progress=False)
        assert engine.prefetch(SHORT[:4])[2:] == [None, None]
        first = engine.generate(rag_prompt(SHORT[:4]), max_tokens=3).report
        assert first.chunks_found == 2
        engine.wait_for_background()
        second = engine.generate(rag_prompt(SHORT[:4]), max_tokens=3).report
        assert second.chunks_found == 4


def test_an_unexpected_error_does_not_end_background_ingestion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tmp_path) as engine:
        monkeypatch.setattr(
            engine.store, "free_bytes", lambda spare_bytes: (_ for _ in ()).throw(RuntimeError("the disk is gone"))
        )
        engine.prefetch(SHORT[:2])
        engine.generate(rag_prompt(SHORT[:2]), max_tokens=2)
        engine.wait_for_background()
        assert engine.store.stats().chunks == 0
        monkeypatch.undo()
        engine.prefetch(SHORT[:2])
        engine.generate(rag_prompt(SHORT[:2]), max_tokens=2)
        engine.wait_for_background()
        assert engine.store.stats().chunks == 2


def test_background_ingestion_can_be_turned_off(tmp_path: Path) -> None:
    with make_engine(tmp_path, store_misses=False) as engine:
        engine.prefetch(SHORT[:1])
        engine.generate(rag_prompt(SHORT[:1]), max_tokens=2)
        engine.wait_for_background()
        assert engine.store.stats().chunks == 0


def test_no_pickle_and_private_files(tmp_path: Path) -> None:
    with make_engine(tmp_path / "kv") as engine:
        engine.build_kv_cache(SHORT[:1], progress=False)
    for path in (tmp_path / "kv").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, f"{path} can be read by others"
    assert os.stat(tmp_path / "kv").st_mode & 0o077 == 0
