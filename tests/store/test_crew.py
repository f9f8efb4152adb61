"""Helping threads: everything is done once, errors come through, and nothing goes on behind the caller's back."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from fused_kv_llm.store.crew import Crew, _Job


def helping_thread():
    """Return a crew of one whose thread has been started."""
    crew = Crew(1)
    crew.run(lambda item: None, [])
    return crew


@pytest.mark.parametrize("size", [0, 1, 3])
def test_every_item_once(size):
    crew, done = Crew(size), []
    for count in (0, 1, 2, 50):
        done.clear()
        crew.run(done.append, range(count))
        assert sorted(done) == list(range(count))


def test_another_thread_helps():
    """Two items that wait for each other can only be done by two threads."""
    barrier, names = threading.Barrier(2), set()

    def meet(_):
        names.add(threading.current_thread().name)
        barrier.wait(10)

    helping_thread().run(meet, range(2))
    assert len(names) == 2
    assert "fused-kv-crew" in names


def test_what_is_being_done_is_waited_for():
    crew, begun, done = helping_thread(), threading.Event(), []

    def do(_):
        if threading.current_thread().name == "fused-kv-crew":
            begun.set()
            time.sleep(0.1)
            done.append("helper")
        else:
            assert begun.wait(10)

    crew.run(do, range(2))
    assert done == ["helper"]


@pytest.mark.parametrize("where", ["helper", "caller"])
def test_an_error_is_raised_where_the_work_was_asked_for(where):
    crew, barrier, done = helping_thread(), threading.Barrier(2), []

    def do(item):
        if item < 2:
            barrier.wait(10)
            if (threading.current_thread().name == "fused-kv-crew") == (where == "helper"):
                raise OSError(5, "Input/output error")
            time.sleep(0.05)
        done.append(item)

    with pytest.raises(OSError, match="Input/output"):
        crew.run(do, range(100))
    # The other one finishes what it has begun, and nothing more.
    assert done in ([0], [1])
    # The thread lives on.
    crew.run(done.append, [7])
    assert done[-1] == 7


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX timers")
def test_an_interrupt_does_not_leave_a_helper_behind():
    crew, begun, over = helping_thread(), threading.Event(), []

    def do(_):
        if threading.current_thread().name == "fused-kv-crew":
            begun.set()
            time.sleep(0.4)
            over.append(True)
        else:
            assert begun.wait(10)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            crew.run(do, range(2))
        assert over == [True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_many_callers_at_once():
    crew, seen, lock = Crew(2), Counter(), threading.Lock()

    def work(caller):
        def do(item):
            with lock:
                seen[caller, item] += 1

        for start in range(0, 300, 10):
            crew.run(do, range(start, start + 10))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert set(seen.values()) == {1}
    assert len(seen) == 6 * 300
    assert crew._running == 0


def test_nobody_is_called_when_every_core_reads_already():
    crew, names = Crew(1), set()

    def inner(_):
        names.add(threading.current_thread())
        time.sleep(0.01)

    def outer(item):
        if item == 0:
            crew.run(inner, range(5))
        time.sleep(0.02)

    crew.run(outer, range(2))
    assert len(names) == 1


def test_without_room_for_a_thread_everyone_works_alone(monkeypatch):
    crew, done = Crew(1), []
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start")))
    crew.run(done.append, range(9))
    assert done == list(range(9))
    monkeypatch.undo()
    crew.run(done.append, [9])
    assert crew._threads == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    crew = helping_thread()
    child = os.fork()
    if child == 0:
        try:
            barrier = threading.Barrier(2)
            crew.run(lambda _: barrier.wait(10), range(2))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("when", ["before the work", "after the work"])
def test_whenever_an_interrupt_comes_nobody_goes_on_behind_the_caller(monkeypatch, when):
    """Memory that a helper writes to belongs to the caller, who may give it away as soon as `run` is left."""
    crew, begun, goes_on, over = helping_thread(), threading.Event(), threading.Event(), []

    def do(_):
        begun.set()
        assert goes_on.wait(10)
        over.append(True)

    def interrupted(job):
        if when == "after the work":
            work(job)
        assert begun.wait(10)
        threading.Timer(0.1, goes_on.set).start()
        raise KeyboardInterrupt

    work = _Job._work
    monkeypatch.setattr(
        _Job, "_work", lambda job: work(job) if threading.current_thread().name == "fused-kv-crew" else interrupted(job)
    )
    items = [0] if when == "before the work" else [0, 1]
    if when == "after the work":
        goes_on.set()
    with pytest.raises(KeyboardInterrupt):
        crew.run(do, items)
    assert len(over) == len(items)
    assert crew._running == 0


def test_an_error_does_not_keep_what_was_read_to():
    """An error and its frames must not hold each other: a request's memory would wait for the collector."""

    class Memory:
        pass

    crew, memory = Crew(0), Memory()
    gone = weakref.ref(memory)

    def do(_, memory=memory):
        raise OSError(5, "Input/output error")

    gc.disable()
    try:
        with contextlib.suppress(OSError):
            crew.run(do, [0])
        del do, memory
        assert gone() is None
    finally:
        gc.enable()
