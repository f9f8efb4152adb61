"""Layers on their way into memory: order, progress, errors, and files that are closed when nobody reads them."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
from waiting import wait_until

from fused_kv_llm.online import LayerRead, LoadAhead
from fused_kv_llm.serving.helper_threads import HelperThreads
from fused_kv_llm.serving.loader import Loader
from fused_kv_llm.serving.read_queue import ReadQueue

ORDER = [3, 4, 5, 0, 1, 2, 6, 7]


def read_all(load: LoadAhead) -> None:
    while (job := load.take()) is not None:
        load.read(job)


def test_layers_come_in_the_order_in_which_they_are_needed() -> None:
    read: list[tuple[str, int]] = []
    changes: list[int] = []

    def place(name: str, seconds: float) -> object:
        def load(start: int, stop: int) -> None:
            time.sleep(seconds)
            read.extend((name, layer) for layer in range(start, stop))

        return load

    slow = LoadAhead(ORDER, [place("a", 0.01), place("b", 0.01)], lambda: changes.append(slow.present))  # type: ignore[list-item]
    read_all(slow)
    assert read == [(name, layer) for layer in ORDER for name in "ab"]
    assert changes == list(range(1, 9))
    assert slow.is_complete
    assert not slow.is_busy
    assert slow.seconds_per_layer == pytest.approx(0.02, rel=0.5)
    assert slow.ended_s >= slow.begun_s + 0.15


def test_fast_layers_are_read_together_and_never_across_a_gap() -> None:
    runs: list[tuple[int, int]] = []
    fast = LoadAhead(ORDER, [lambda start, stop: runs.append((start, stop))], lambda: None)
    read_all(fast)
    assert [layer for run in runs for layer in range(*run)] == ORDER
    assert len(runs) < len(ORDER)


def test_what_goes_wrong_is_kept_and_ends_the_reading() -> None:
    def fail(start: int, stop: int) -> None:
        if start == 5:
            raise OSError("no such layer")
        time.sleep(0.01)

    changes: list[bool] = []
    load = LoadAhead(ORDER, [fail], lambda: changes.append(load.error is not None))
    read_all(load)
    assert load.present == 2
    assert isinstance(load.error, OSError)
    assert changes == [False, False, True]
    assert load.is_over


def test_files_are_closed_by_who_reads_last() -> None:
    go, closed = threading.Event(), threading.Event()
    load = LoadAhead(ORDER, [lambda *_: go.wait(10)], lambda: None)  # type: ignore[list-item]
    job = load.take()
    assert job is not None
    thread = threading.Thread(target=load.read, args=(job,))
    thread.start()
    load.end(closed.set)
    load.end(lambda: pytest.fail("closed twice"))
    assert not closed.is_set()
    assert load.take() is None
    go.set()
    assert closed.wait(10)
    thread.join()
    idle = LoadAhead(ORDER, [lambda *_: None], lambda: None)
    idle.end(closed.clear)
    assert not closed.is_set()


def test_requests_are_loaded_in_their_order_and_around_one_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_kv_llm.serving.read_queue.STUCK_S", 0.1)
    go, loader, ended = threading.Event(), Loader(), list[str]()
    stuck = LoadAhead(ORDER, [lambda *_: go.wait(10)] * 6, lambda: None)  # type: ignore[list-item]

    def noted(name: str) -> LoadAhead:
        load = LoadAhead(
            ORDER, [lambda *_: time.sleep(0.002)] * 3, lambda: ended.append(name) if load.is_over else None
        )
        return load

    first, second = noted("first"), noted("second")
    for load in (stuck, first, second):
        loader.add(load)
    wait_until(lambda: bool(loader.look()) or second.is_complete)
    assert ended == ["first", "second"]
    assert stuck.present == 0
    go.set()
    wait_until(lambda: bool(loader.look()) or stuck.is_complete)
    loader.close()


def test_readers_that_die_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, died, read = Loader(), list[int](), LoadAhead.read

    def die(self: LoadAhead, job: LayerRead) -> None:
        if len(died) < 6:
            died.append(1)
            raise SystemExit("a reader is told to end")
        read(self, job)

    monkeypatch.setattr(LoadAhead, "read", die)
    loads = [LoadAhead(ORDER, [lambda *_: None] * 2, lambda: None) for _ in range(8)]
    for load in loads:
        loader.add(load)
    wait_until(lambda: bool(loader.look()) or sum(load.is_complete for load in loads) >= 2)
    assert len(died) == 6
    loader.close()


def test_reads_can_be_timed_by_another_clock() -> None:
    now_s = 100.0
    load = LoadAhead(ORDER, [lambda *_: pytest.fail("nothing is read")] * 2, lambda: None, lambda: now_s)
    queue = ReadQueue(lambda: now_s)
    assert not queue.wants_reader()
    queue.add(load)
    assert queue.wants_reader()
    while (taken := queue.take()) is not None:
        now_s += 0.5
        taken[0].came_back(taken[1], 0.5, 0.0)
        queue.came_back(taken[1])
    assert load.is_complete
    assert not load.is_busy
    # Eight layers of two places, one after another.
    assert (load.begun_s, load.ended_s) == (100.0, 108.0)
    assert load.seconds_per_layer == pytest.approx(1.0)


def test_a_reader_that_does_not_come_back_is_replaced() -> None:
    now_s = 0.0
    loads = [LoadAhead(ORDER, [lambda *_: None] * 9, lambda: None, lambda: now_s) for _ in range(2)]
    queue = ReadQueue(lambda: now_s)
    for load in loads:
        queue.add(load)
    # The first read of a request tells whether more at once would help.
    taken = [queue.take() for _ in range(3) if queue.wants_reader()]
    assert [one and one[0] for one in taken] == [*loads, None]
    now_s = 2.0
    assert all(load.is_stuck for load in loads)
    third = LoadAhead(ORDER, [lambda *_: None], lambda: None, lambda: now_s)
    queue.add(third)
    assert queue.wants_reader()
    job = queue.take()
    assert job is not None
    assert job[0] is third


def test_a_thread_that_waits_keeps_nothing_of_its_last_job() -> None:
    class Engine:
        pass

    threads, engine = HelperThreads(1, "test-keeps-nothing"), Engine()
    seen = weakref.ref(engine)
    threads.submit(lambda engine: None, engine)
    del engine
    wait_until(lambda: seen() is None)
    threads.close()
