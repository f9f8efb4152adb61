"""Ingestion beside requests: it goes on, a first token waits for one piece at most, and answers stay what they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from waiting import exit_status, wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import EngineClosedError
from fused_kv_llm.model import ModelLock, PieceSpeed
from fused_kv_llm.offline import prefill
from fused_kv_llm.serving import StepLoop, ingestion_pieces
from fused_kv_llm.serving.ingestion_pieces import IngestionPieces, Piece

PROMPT = rag_prompt(SHORT[:3], "Which ferry is the largest?")
NEW = [f"{text} So says number {number}." for number in range(6) for text in SHORT[:10]]


def make_engine(folder: Path, **options: Any) -> FusedKVEngine:
    options = {
        "preprocessing": "none",
        "recompute_ratio": 0.3,
        "max_batched_rows": 24,
        "prefix_cache_bytes": 0,
        **options,
    }
    made = FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32", **options)
    made.build_kv_cache(SHORT[:6], progress=False)
    return made


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    with make_engine(tmp_path) as made:
        yield made


def is_busy(engine: FusedKVEngine) -> bool:
    """Return whether requests or pieces are left."""
    loop: StepLoop = engine.requests._loop
    return loop._open > 0 or len(loop._pieces) > 0


class SlowPieces:
    """Pieces of one chunk that take so long; notes when they began and ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.spans, self._run, self._seconds = list[tuple[float, float]](), prefill.prefill_packed, seconds
        monkeypatch.setattr(prefill, "prefill_packed", self.run)
        monkeypatch.setattr(prefill, "BATCH_TOKENS", 1)

    def run(self, *args: Any) -> Any:
        started = time.perf_counter()
        time.sleep(self._seconds)
        try:
            return self._run(*args)
        finally:
            self.spans.append((started, time.perf_counter()))

    def within(self, begin: float, end: float) -> int:
        """Return how many took a part of that time."""
        return sum(started < end and ended > begin for started, ended in self.spans)


class Ingestion(threading.Thread):
    """An ingestion in another thread; notes what ended it."""

    def __init__(self, engine: FusedKVEngine, texts: list[str] = NEW, **options: Any) -> None:
        super().__init__(daemon=True)
        self._engine, self._texts, self._options = engine, texts, options
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._engine.build_kv_cache(self._texts, progress=False, **self._options)
        except BaseException as error:
            self.error = error


def ask_until_it_ends(engine: FusedKVEngine, ingestion: Ingestion) -> int:
    """Have three requests answered at a time, without a pause, and return how many were meanwhile."""
    answered, deadline = 0, time.monotonic() + 40
    ahead = [engine.submit(PROMPT, max_tokens=30) for _ in range(3)]
    while ingestion.is_alive() and time.monotonic() < deadline:
        ahead.append(engine.submit(PROMPT, max_tokens=30))
        ahead.pop(0).result()
        answered += 1
    is_over = not ingestion.is_alive()
    for handle in ahead:
        handle.result()
    assert is_over
    assert ingestion.error is None
    return answered


def test_ingestion_goes_on_under_requests_that_never_stop(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between tokens: it is not left to what is owed after long."""
    monkeypatch.setattr(ingestion_pieces, "_OWED_S", 1e9)
    monkeypatch.setattr(prefill, "BATCH_TOKENS", 1)
    assert ask_until_it_ends(engine, Ingestion(engine)) > 0
    assert len(engine.stored_texts()) == 6 + len(NEW)


def test_preprocessing_goes_on_under_requests_that_never_stop(tmp_path: Path) -> None:
    texts = SHORT[6:9]
    with make_engine(tmp_path, preprocessing="similar", num_neighbours=3, store_misses=False) as engine:
        engine.wait_for_background()
        ingestion = Ingestion(engine, texts, neighbours=dict.fromkeys(texts, SHORT[:3]), preprocess="wait")
        assert ask_until_it_ends(engine, ingestion) > 0


def test_a_first_token_waits_for_one_piece_at_most(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if finding its chunks takes longer than a piece, and while another answer is being written."""
    monkeypatch.setattr(ingestion_pieces, "_LOADING_S", 30.0)
    monkeypatch.setattr(ingestion_pieces, "_OWED_S", 30.0)
    slow, plan = SlowPieces(monkeypatch, 0.05), engine.requests.planner.plan

    def slow_plan(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return plan(*args, **options)

    monkeypatch.setattr(engine.requests.planner, "plan", slow_plan)
    ingestion = Ingestion(engine)
    other = engine.submit(PROMPT, max_tokens=1500)
    other.wait_for_first()
    wait_until(lambda: len(slow.spans) > 3)
    for _ in range(5):
        submitted = time.perf_counter()
        handle = engine.submit(PROMPT, recompute_ratio=1.0, max_tokens=2)
        handle.wait_for_first()
        assert slow.within(submitted, time.perf_counter()) <= 1
        handle.result()
    assert ingestion.is_alive()
    other.cancel()
    ingestion.join(60)
    assert ingestion.error is None


def test_answers_and_stored_kv_are_those_of_either_alone(engine: FusedKVEngine, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"recompute_ratio": 1.0}]
    want = [engine.generate(PROMPT, max_tokens=40, **one).token_ids for one in options]
    ingestion = Ingestion(engine)
    found = [[engine.generate(PROMPT, max_tokens=40, **one).token_ids for one in options] for _ in range(3)]
    ingestion.join(60)
    assert ingestion.error is None
    assert found == [want] * 3
    with make_engine(tmp_path / "alone") as alone:
        alone.build_kv_cache(NEW, progress=False)
        for text in NEW[::7]:
            ids = tuple(engine.token_ids(text))
            kv = []
            for each in (engine, alone):
                stored = each.store.open(str(each.chunk_id(text)), ids)
                assert stored is not None
                with stored:
                    kv.append(stored.read_layers(0, stored.num_layers))
            for one, other in zip(*kv, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_closing_the_engine_ends_what_it_ingests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, and what was computed is stored."""
    engine, slow = make_engine(tmp_path), SlowPieces(monkeypatch, 0.02)
    ingestion, handle = Ingestion(engine), engine.submit(PROMPT, max_tokens=1500)
    wait_until(lambda: len(slow.spans) > 3)
    engine.close()
    with pytest.raises(EngineClosedError):
        handle.result()
    ingestion.join(30)
    assert not ingestion.is_alive()
    assert not is_busy(engine)
    with make_engine(tmp_path) as again:
        assert len(again.stored_texts()) >= 8


def test_ctrl_c_leaves_an_ingestion_that_waits_for_its_turn(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowPieces(monkeypatch, 0.0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with engine.model_lock:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                engine.build_kv_cache(NEW, progress=False)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert engine.generate(PROMPT, max_tokens=3).token_ids
    wait_until(lambda: not is_busy(engine))
    assert len(slow.spans) <= 1, "the piece that had its turn, at most"
    engine.build_kv_cache(NEW, progress=False)
    assert len(engine.stored_texts()) == 6 + len(NEW)


def test_what_fails_in_a_piece_is_told_to_who_ingests_only(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no memory for this batch")

    handle = engine.submit(PROMPT, max_tokens=200)
    with monkeypatch.context() as patch:
        patch.setattr(prefill, "prefill_packed", fail)
        with pytest.raises(MemoryError, match="this batch"):
            engine.build_kv_cache(NEW, progress=False)
    assert len(handle.result().token_ids) > 0
    assert engine.build_kv_cache(NEW, progress=False).chunks_new == len(NEW)


def test_a_constraint_may_ingest(engine: FusedKVEngine) -> None:
    """It is called by the thread that computes: handing the pieces to itself, it would wait for ever."""

    def ingests(ids: Any, logits: torch.Tensor) -> torch.Tensor:
        if len(ids) == 2:
            engine.build_kv_cache(SHORT[10:12], progress=False)
        return logits

    handle = engine.submit(PROMPT, constraint=ingests, max_tokens=4)
    ended = threading.Event()
    threading.Thread(target=lambda: (handle.result(), ended.set()), daemon=True).start()
    assert ended.wait(20)
    assert engine.chunk_id(SHORT[10]) is not None


def test_a_caller_that_wants_the_model_for_itself_does_not_wait_for_all_of_an_ingestion(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowPieces(monkeypatch, 0.05)
    # Two, so that a piece waits whenever one has ended.
    ingestion, other = Ingestion(engine, NEW[:40]), Ingestion(engine, NEW[40:])
    wait_until(lambda: len(slow.spans) > 2)
    for _ in range(5):
        started = time.perf_counter()
        with engine.model_lock:
            assert slow.within(started, time.perf_counter()) <= 1
    assert ingestion.is_alive()
    for each in (ingestion, other):
        each.join(60)
        assert each.error is None


def test_no_piece_begins_while_another_thread_waits_for_the_model(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowPieces(monkeypatch, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(ModelLock, "is_wanted", True)
        ingestion = Ingestion(engine)
        assert engine.generate(PROMPT, max_tokens=3).token_ids
        time.sleep(0.2)
        assert not slow.spans
    ingestion.join(60)
    assert ingestion.error is None
    assert slow.spans


@pytest.mark.parametrize("thread", ["daemon", "ordinary"])
def test_a_process_may_end_while_a_thread_ingests(tmp_path: Path, thread: str) -> None:
    script = textwrap.dedent(f"""
        import sys, threading, time
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from corpus import SHORT
        from models import smollm2_tokenizer, tiny_model
        from fused_kv_llm import FusedKVEngine
        tokenizer, folder = smollm2_tokenizer(), {str(tmp_path)!r}
        engine = FusedKVEngine(tiny_model(), tokenizer=tokenizer, kv_dir=folder, preprocessing="none")
        repeats = {400 if thread == "daemon" else 3}
        texts = [f"{{text}} So says {{number}}." for number in range(repeats) for text in SHORT]
        engine.build_kv_cache(texts[:2], progress=False)
        def ingest():
            engine.build_kv_cache(texts, progress=False)
            print("stored", len(engine.stored_texts()))
        threading.Thread(target=ingest, daemon={thread == "daemon"}).start()
        time.sleep(0.3)
    """)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    if thread == "ordinary":
        assert f"stored {3 * len(set(SHORT))}" in ended.stdout, ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_forked_during_an_ingestion_can_ingest(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    slow = SlowPieces(monkeypatch, 0.02)
    ingestion = Ingestion(engine)
    wait_until(lambda: len(slow.spans) > 2)
    child = os.fork()
    if child == 0:
        try:
            engine.requests._loop.run(lambda: None)
            os._exit(0)
        finally:
            os._exit(2)
    assert exit_status(child) == 0
    ingestion.join(60)
    assert ingestion.error is None


# -- whose turn it is ------------------------------------------------------------------------------------------


class Clock:
    """A clock that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(ingestion_pieces, "time", self)

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now_s

    def piece(self, seconds: float, num_tokens: int = 0) -> Piece[None]:
        """Return a piece that takes so long."""

        def work() -> None:
            self.now_s += seconds

        return Piece(work, num_tokens)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def serve(
    clock: Clock, fuse_s: float, tokens: int, step_s: float, piece_s: float, requests: int
) -> tuple[float, float]:
    """Serve requests one after another beside pieces; return the seconds of steps, and of pieces."""
    pieces, steps_s, began_s = IngestionPieces(), 0.0, clock.now_s
    for _ in range(requests):
        for number in range(tokens):
            if not len(pieces):
                pieces.add(clock.piece(piece_s, 100))
            assert pieces.due_s(fusing=number == 0, loading=False, decoding=number > 0) >= 0
            seconds = step_s if number else fuse_s
            clock.now_s, steps_s = clock.now_s + seconds, steps_s + seconds
            pieces.requests_had(seconds)
            if pieces.due_s(fusing=False, loading=False, decoding=number + 1 < tokens) <= 0:
                pieces.compute_next()
    return steps_s, clock.now_s - began_s - steps_s


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("piece_s", [0.02, 0.1, 0.3])
def test_ingestion_gets_three_fifths_of_the_time(clock: Clock, tokens: int, piece_s: float) -> None:
    steps_s, pieces_s = serve(clock, 0.4, tokens, 0.035, piece_s, 50)
    if tokens * piece_s >= 1.5 * (0.4 + tokens * 0.035):  # otherwise one piece a token is less
        assert 1.35 < pieces_s / steps_s < 1.9


def test_there_is_one_piece_between_two_tokens_and_none_before_a_first(clock: Clock) -> None:
    pieces = IngestionPieces()
    pieces.requests_had(0.0)
    for _ in range(2):
        pieces.add(clock.piece(0.01))
    pieces.requests_had(0.5)
    assert pieces.due_s(fusing=True, loading=False, decoding=True) == float("inf")
    assert 0 < pieces.due_s(fusing=False, loading=True, decoding=True) < 0.11
    assert pieces.due_s(fusing=False, loading=False, decoding=True) == 0
    pieces.requests_had(1.0)
    assert pieces.due_s(fusing=True, loading=False, decoding=True) == 0, "it does not starve"


def test_a_slow_disk_does_not_keep_ingestion_waiting(clock: Clock) -> None:
    pieces = IngestionPieces()
    pieces.add(clock.piece(0.01))
    assert pieces.due_s(fusing=False, loading=True, decoding=False) == pytest.approx(0.1)
    clock.now_s += 0.11
    assert pieces.due_s(fusing=False, loading=True, decoding=False) == 0


def test_pieces_are_short_while_requests_are_about_and_full_otherwise(clock: Clock) -> None:
    """At 1,000 tokens a second: 100 tokens, 500 tokens; on a machine that is much faster all that a batch may have."""
    pieces = IngestionPieces()
    assert pieces.piece_tokens(2048) == 256
    for _ in range(8):
        pieces.add(clock.piece(0.2, 200))
        pieces.compute_next()
    assert pieces.piece_tokens(2048) == pytest.approx(500, abs=2)
    pieces.requests_had(0.1)
    assert pieces.piece_tokens(2048) == pytest.approx(100, abs=2)
    assert pieces.piece_tokens(64) == 64
    clock.now_s += 11
    assert pieces.piece_tokens(2048) == pytest.approx(500, abs=2)
    for _ in range(20):
        pieces.add(clock.piece(0.01, 1000))
        pieces.compute_next()
    assert pieces.piece_tokens(2048) == 2048


def test_pieces_of_a_kind_have_a_speed_of_their_own(clock: Clock) -> None:
    pieces, fast = IngestionPieces(), PieceSpeed()
    pieces.add(clock.piece(0.2, 200))
    pieces.compute_next()
    assert pieces.piece_tokens(2048, fast) == pytest.approx(500, abs=2), "not known yet: as the others"
    fast.note(0.2, 400)
    assert pieces.piece_tokens(2048, fast) == pytest.approx(1000, abs=2)
    assert pieces.piece_tokens(2048) == pytest.approx(500, abs=2)


def test_after_an_answer_the_next_question_may_come_first(clock: Clock) -> None:
    pieces = IngestionPieces()
    pieces.requests_had(0.1)
    pieces.add(clock.piece(0.01))
    assert 0 < pieces.due_s(fusing=False, loading=False, decoding=False) <= 0.02
    clock.now_s += 0.02
    assert pieces.due_s(fusing=False, loading=False, decoding=False) == 0


def test_pieces_are_refused_when_the_process_ends(clock: Clock) -> None:
    pieces, waiting, late = IngestionPieces(), clock.piece(0.01), clock.piece(0.01)
    pieces.add(waiting)
    pieces.end()
    pieces.add(late)
    assert not len(pieces)
    stopped: Callable[[], bool] = lambda: False  # noqa: E731
    for piece in (waiting, late):
        with pytest.raises(EngineClosedError):
            piece.result(stopped)
