"""What queued requests need is loaded while others compute; a slow disk, or a dead one, delays its own requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import DeadlineError, EngineClosedError, RequestCancelledError, StoreFullError
from fused_kv_llm.store import ThrottledReader
from fused_kv_llm.store.read.blocks import read_block

SLOW = rag_prompt(SHORT[:3], "Which ferry is the largest?")
QUICK = rag_prompt(SHORT[3:5], "Which ferry is the oldest?")


class Gate:
    """A reader whose disk does not answer until the gate is opened."""

    def __init__(self) -> None:
        self.go, self.waiting, self.reads = threading.Event(), 0, 0

    def __call__(self, fd: int, target: memoryview, offset: int) -> None:
        self.waiting += 1
        assert self.go.wait(60)
        self.waiting -= 1
        self.reads += 1
        read_block(fd, target, offset)


@pytest.fixture(params=["none", "similar"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FusedKVEngine]:
    with FusedKVEngine(
        tiny_model(),
        tokenizer=smollm2_tokenizer(),
        kv_dir=tmp_path,
        dtype="float32",
        preprocessing=request.param,
        prefix_cache_bytes=0,
    ) as made:
        made.build_kv_cache(SHORT[:5], progress=False, preprocess="wait")
        yield made


@pytest.fixture
def gate(engine: FusedKVEngine) -> Iterator[Gate]:
    """A disk that does not answer; what the quick prompt needs is in memory."""
    engine.store.drop_memory()
    for _ in range(3):
        engine.generate(QUICK, max_tokens=1)
    made = Gate()
    engine.store.read_with(made)
    yield made
    made.go.set()


def test_a_dead_disk_delays_its_own_request_only(engine: FusedKVEngine, gate: Gate) -> None:
    slow = engine.submit(SLOW, max_tokens=6)
    wait_until(lambda: gate.waiting > 0, 60)
    quick = [engine.submit(QUICK, max_tokens=3).result() for _ in range(3)]
    assert [set(one.report.bytes_loaded) for one in quick] == [{"memory"}] * 3
    assert gate.reads == 0
    gate.go.set()
    got = slow.result()
    assert got.report.bytes_loaded["disk"] > 0
    assert got.report.seconds["load"] > 0
    assert got.token_ids == engine.generate(SLOW, max_tokens=6).token_ids


def test_what_a_queued_request_needs_is_read_while_others_compute(engine: FusedKVEngine, gate: Gate) -> None:
    gate.go.set()
    busy = engine.submit(QUICK, max_tokens=1000)
    busy.wait_for_first()
    thread = set[str]()
    gate.reads = 0

    def noting(fd: int, target: memoryview, offset: int) -> None:
        thread.add(threading.current_thread().name[:13])
        gate(fd, target, offset)

    engine.store.read_with(noting)
    got = engine.generate(SLOW, max_tokens=3)
    busy.cancel()
    assert gate.reads > 0
    assert thread == {"fused-kv-load"}
    assert got.report.bytes_loaded["disk"] > 0


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
def test_a_request_that_is_loaded_can_be_given_up(engine: FusedKVEngine, gate: Gate, how: str) -> None:
    busy = engine.submit(QUICK, max_tokens=1500)
    busy.wait_for_first()
    slow = engine.submit(SLOW, max_tokens=6, timeout_s=3 if how == "deadline" else None)
    wait_until(lambda: gate.waiting > 0, 60)
    if how == "cancel":
        slow.cancel()
    elif how == "close":
        engine.close()
    error = {"cancel": RequestCancelledError, "deadline": DeadlineError, "close": EngineClosedError}[how]
    with pytest.raises(error):
        slow.result()
    # Nobody waited for the disk.
    assert gate.reads == 0
    busy.cancel()
    gate.go.set()
    wait_until(lambda: gate.waiting == 0)
    if how != "close":
        assert engine.generate(SLOW, max_tokens=2).token_ids


def test_a_chunk_that_is_damaged_is_found_while_it_is_loaded(engine: FusedKVEngine, gate: Gate, tmp_path: Path) -> None:
    gate.go.set()
    want = engine.generate(SLOW, max_tokens=4).report
    engine.store.drop_memory()
    key = engine.chunk_id(SHORT[1])
    assert key is not None
    path = next(tmp_path.glob(f"chunks/**/{key}*"))
    damaged = bytearray(path.read_bytes())
    damaged[-100] ^= 1
    path.write_bytes(damaged)
    busy = engine.submit(QUICK, max_tokens=1500)
    busy.wait_for_first()
    with pytest.warns(Warning, match="checksum"):
        got = engine.generate(SLOW, max_tokens=4)
    busy.cancel()
    assert want.chunks_found == 3
    assert (got.report.chunks_found, got.report.chunks_missed) == (2, 1)


def test_what_is_being_loaded_is_not_evicted(engine: FusedKVEngine, gate: Gate) -> None:
    busy = engine.submit(QUICK, max_tokens=1500)
    busy.wait_for_first()
    slow = engine.submit(SLOW, max_tokens=3)
    wait_until(lambda: gate.waiting > 0, 60)
    with pytest.raises(StoreFullError):
        engine.store.evict(0)
    assert all(engine.chunk_id(text) is not None for text in SHORT[:3])
    gate.go.set()
    got = slow.result()
    busy.cancel()
    assert got.report.chunks_found == 3
    assert got.report.chunks_missed == 0


def test_a_slow_disk_gives_the_same_answer_layer_by_layer(engine: FusedKVEngine) -> None:
    want = engine.generate(SLOW, max_tokens=5)
    engine.store.drop_memory()
    nbytes = sum(want.report.bytes_loaded.values())
    engine.store.read_with(ThrottledReader(nbytes / 0.5))
    got = engine.generate(SLOW, max_tokens=5)
    assert got.token_ids == want.token_ids
    assert got.report.bytes_loaded["disk"] > 0
    seconds = got.report.seconds
    assert seconds["load"] > 0.05
    assert seconds["load"] + seconds["fuse"] > 0.4
