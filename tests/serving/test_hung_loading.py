"""A disk that hangs, threads that die, a store that is gone: chunks are computed instead, and nobody waits for ever."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import SHORT, rag_prompt
from held_memory import caches_in_use
from models import smollm2_tokenizer, tiny_model
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.report import FusionReport
from fused_kv_llm.serving.helper_threads import HelperThreads
from fused_kv_llm.store.read.blocks import read_block

PROMPTS = [rag_prompt(SHORT[at : at + 3], "Which ferry is the largest?") for at in range(4)]
TIMEOUT_S = 1.2


class Disk:
    """A reader that hangs while it is told to, in what it is told to."""

    def __init__(self, only: str | None = None) -> None:
        self.go, self.hanging, self.only = threading.Event(), 0, only

    def __call__(self, fd: int, target: memoryview, offset: int) -> None:
        if not self.go.is_set() and (self.only is None or self.only in os.readlink(f"/proc/self/fd/{fd}")):
            self.hanging += 1
            assert self.go.wait(60)
            self.hanging -= 1
        read_block(fd, target, offset)


def make_engine(folder: Path, **options: Any) -> FusedKVEngine:
    options = {"prefix_cache_bytes": 0, "store_misses": False, "recompute_ratio": 0.3, "memory_bytes": 0, **options}
    return FusedKVEngine(
        tiny_model(),
        tokenizer=smollm2_tokenizer(),
        kv_dir=folder,
        dtype="float32",
        preprocessing="none",
        load_timeout_s=TIMEOUT_S,
        **options,
    )


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    with make_engine(tmp_path) as made:
        made.build_kv_cache(SHORT[:6], progress=False)
        yield made


@pytest.fixture
def full(engine: FusedKVEngine) -> list[list[int]]:
    return [engine.generate(prompt, max_tokens=8, recompute_ratio=1.0).token_ids for prompt in PROMPTS]


def nothing_is_left(engine: FusedKVEngine) -> None:
    wait_until(lambda: engine.requests._loop._open == 0)
    assert not caches_in_use(engine)
    wait_until(lambda: not engine.requests.hung._hung)


@pytest.mark.parametrize("beside", [False, True])
def test_chunks_that_do_not_come_are_computed(engine: FusedKVEngine, full: list[list[int]], beside: bool) -> None:
    want = engine.generate(PROMPTS[3], max_tokens=60).token_ids
    busy = engine.submit(PROMPTS[3], max_tokens=60) if beside else None
    if busy is not None:
        busy.wait_for_first()
    disk = Disk()
    engine.store.read_with(disk)
    begun_s = time.monotonic()
    got = engine.generate(PROMPTS[0], max_tokens=8)
    assert time.monotonic() - begun_s > TIMEOUT_S
    assert disk.hanging > 0
    # Without stored KV it is a full prefill.
    assert got.token_ids == full[0]
    assert (got.report.chunks_found, got.report.chunks_missed) == (0, 3)
    assert sum("load_timeout_s" in warning for warning in got.report.warnings) == 3
    assert engine.requests.recovery.given_up_loads >= 1
    if busy is not None:
        assert busy.result().token_ids == want
    disk.go.set()
    nothing_is_left(engine)
    again = engine.generate(PROMPTS[0], max_tokens=8).report
    assert (again.chunks_found, again.chunks_missed) == (3, 0)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="files are told apart by the system's list of them")
def test_only_the_chunk_that_hangs_is_computed(engine: FusedKVEngine) -> None:
    busy = engine.submit(PROMPTS[3], max_tokens=600)
    busy.wait_for_first()
    disk = Disk(only=_file_of(engine, SHORT[1]))
    engine.store.read_with(disk)
    got = engine.generate(PROMPTS[0], max_tokens=8).report
    busy.cancel()
    assert (got.chunks_found, got.chunks_missed) == (2, 1)
    disk.go.set()
    nothing_is_left(engine)


def _file_of(engine: FusedKVEngine, text: str) -> str:
    with engine.requests.planner.plan(rag_prompt([text], "Which?"), FusionReport()) as request:
        return request.chunks[0].stored.key


def test_on_a_dead_disk_later_requests_do_not_wait_and_it_may_come_back(
    engine: FusedKVEngine, full: list[list[int]]
) -> None:
    disk = Disk()
    engine.store.read_with(disk)
    handles = [engine.submit(prompt, max_tokens=8) for prompt in PROMPTS]
    assert [handle.result().token_ids for handle in handles] == full
    begun_s = time.monotonic()
    assert [engine.generate(prompt, max_tokens=8).token_ids for prompt in PROMPTS] == full
    assert time.monotonic() - begun_s < TIMEOUT_S * len(PROMPTS)
    disk.go.set()
    nothing_is_left(engine)
    assert engine.generate(PROMPTS[0], max_tokens=8).report.chunks_found == 3


def test_closing_does_not_wait_for_a_disk(tmp_path: Path) -> None:
    disk = Disk()
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        engine.store.read_with(disk)
        handle = engine.submit(PROMPTS[0], max_tokens=8)
        wait_until(lambda: disk.hanging > 0)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < TIMEOUT_S + 5
    assert handle.done
    disk.go.set()


def test_a_thread_that_dies_is_replaced(engine: FusedKVEngine) -> None:
    want = engine.generate(PROMPTS[0], max_tokens=8).token_ids
    killed = list[str]()

    def kill(fd: int, target: memoryview, offset: int) -> None:
        name = threading.current_thread().name
        if name.startswith("fused-kv-load") and len(killed) < 2:
            killed.append(name)
            raise SystemExit("the thread is told to end")
        read_block(fd, target, offset)

    busy = engine.submit(PROMPTS[3], max_tokens=600)
    busy.wait_for_first()
    engine.store.read_with(kill)
    got = engine.generate(PROMPTS[0], max_tokens=8)
    busy.cancel()
    assert killed
    assert got.token_ids == want
    assert got.report.retries == len(killed)
    nothing_is_left(engine)


def test_a_plan_that_comes_too_late_leaves_nothing_in_the_report(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = engine.submit(PROMPTS[3], max_tokens=1500)
    busy.wait_for_first()
    go, late, plan_served = threading.Event(), list[str](), engine.requests.plan_served

    def hang_once(*args: Any, **options: Any) -> Any:
        if not late:
            late.append("hangs")
            assert go.wait(60)
            try:
                return plan_served(*args, **options)
            finally:
                late.append("came")
        return plan_served(*args, **options)

    monkeypatch.setattr(engine.requests, "plan_served", hang_once)
    handle = engine.submit(PROMPTS[0], max_tokens=200)
    handle.wait_for_first()
    go.set()
    wait_until(lambda: late == ["hangs", "came"] and not engine.requests.hung._hung)
    report = handle.result().report
    busy.cancel()
    assert report.seconds["align"] < TIMEOUT_S / 2
    assert all(one.end_s - one.start_s < TIMEOUT_S / 2 for one in report.timeline if one.stage == "align")
    nothing_is_left(engine)


def test_helpers_that_die_or_hang_do_not_keep_others_from_working() -> None:
    helpers, done, go = HelperThreads(2, "helper"), list[int](), threading.Event()

    def die() -> None:
        raise SystemExit("the end")

    # All of them wait before the first one fails: nobody comes later and starts another thread.
    all_wait = threading.Event()
    for _ in range(2):
        helpers.submit(all_wait.wait)
    for _ in range(4):
        helpers.submit(die)
    helpers.submit(done.append, 1)
    all_wait.set()
    wait_until(lambda: done == [1])
    for _ in range(2):
        helpers.submit(go.wait)
    helpers.submit(done.append, 2)
    time.sleep(0.05)
    assert done == [1]
    helpers.give_up_one()
    helpers.submit(done.append, 3)
    wait_until(lambda: done == [1, 2, 3])
    go.set()
    helpers.came_back()
    helpers.close()
    helpers.submit(done.append, 4)
    wait_until(lambda: done[-1] == 4)
    helpers.close()
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "helper"])


def test_a_process_ends_though_a_helper_hangs() -> None:
    program = """
        import threading
        from fused_kv_llm.serving.helper_threads import HelperThreads
        HelperThreads(2, "helper").submit(threading.Event().wait)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


@pytest.mark.parametrize("memory_bytes", [0, 2**26])
@pytest.mark.filterwarnings("ignore::fused_kv_llm.errors.FusedKVWarning")
def test_a_folder_that_is_deleted_costs_time_only(tmp_path: Path, memory_bytes: int) -> None:
    with make_engine(tmp_path, memory_bytes=memory_bytes) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        full = [engine.generate(prompt, max_tokens=8, recompute_ratio=1.0).token_ids for prompt in PROMPTS]
        long = engine.generate(PROMPTS[0], max_tokens=200).token_ids
        engine.store.drop_memory()
        busy = engine.submit(PROMPTS[0], max_tokens=200)
        busy.wait_for_first()
        shutil.rmtree(tmp_path)
        handles = [engine.submit(prompt, max_tokens=8) for prompt in PROMPTS[1:]]
        for number, handle in enumerate(handles, 1):
            got = handle.result()
            # Nothing of it is in memory.
            assert got.token_ids == full[number]
            assert got.report.chunks_found == 0
            assert got.report.warnings
        assert busy.result().token_ids == long
        nothing_is_left(engine)


@pytest.mark.parametrize("value", [0, -1.0, "soon", True])
def test_a_timeout_that_cannot_be_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="load_timeout_s"):
        FusedKVEngine(tiny_model(), kv_dir=tmp_path, load_timeout_s=value)
