"""Reads ahead of the layers that are due: their order, how far they go, and what becomes of those nobody needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.online.read_ahead import LayerReads, ReadAhead, layer_groups, reader_threads


@given(num_layers=st.integers(1, 64), first=st.sets(st.integers(0, 63), max_size=6))
def test_groups_cover_all_layers_once_with_the_needed_ones_first(num_layers: int, first: set[int]) -> None:
    first = {layer for layer in first if layer < num_layers}
    groups = layer_groups(num_layers, first)
    read = [layer for group in groups for layer in group]
    assert sorted(read) == list(range(num_layers))
    assert read[: len(first)] == sorted(first)
    assert len(groups[0]) <= 4
    assert all(len(group) <= 8 for group in groups)
    assert [layer for group in layer_groups(num_layers, first, resident=True) for layer in group] == read


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


T = TypeVar("T")
Log = list[tuple[str, int]]


def noted(log: Log, name: str) -> LayerReads[tuple[str, range]]:
    """A place that writes down what is read there, and with an exclamation mark what is announced."""

    def read(start: int, stop: int) -> tuple[str, range]:
        log.append((name, start))
        return name, range(start, stop)

    return LayerReads(read, lambda start, stop: log.append((f"{name}!", start)))


def silent(read: Callable[[int, int], T]) -> LayerReads[T]:
    return LayerReads(read, lambda start, stop: pytest.fail("announced to a system that is not to read"))


def test_one_group_more_than_the_one_in_use_is_read(executor: ThreadPoolExecutor) -> None:
    log: Log = []
    ahead = ReadAhead(executor, layer_groups(28), [noted(log, "a"), noted(log, "b")])
    ahead.start()
    executor.submit(int).result()
    assert log == [("a", 0), ("b", 0)]
    assert ahead.take(2) == [("a", range(4)), ("b", range(4))]
    executor.submit(int).result()
    assert log == [(name, start) for start in (0, 4) for name in "ab"]
    assert ahead.take(3) == ahead.take(0)
    assert ahead.take(4) == [("a", range(4, 12)), ("b", range(4, 12))]
    executor.submit(int).result()
    assert log[4:] == [("a", 12), ("b", 12)]
    # Back to the beginning, as a second pass does: what was passed is read again, what is still coming is not.
    assert ahead.take(0) == [("a", range(4)), ("b", range(4))]
    assert ahead.take(4) == [("a", range(4, 12)), ("b", range(4, 12))]
    executor.submit(int).result()
    assert log[6:] == [(name, start) for start in (0, 12) for name in "ab"]
    ahead.close()


def test_what_is_needed_soon_does_not_wait_behind_what_is_needed_late(executor: ThreadPoolExecutor) -> None:
    log: Log = []
    first, second = (ReadAhead(executor, layer_groups(32), [noted(log, name)]) for name in "ab")
    for layer in range(32):
        first.take(layer)
        second.take(layer)
    order = {entry: place for place, entry in enumerate(log)}
    assert all(order["b", start] < order["a", start + 16] for start in (4, 12))


def test_reads_that_nobody_needs_are_dropped_or_waited_for(executor: ThreadPoolExecutor) -> None:
    begun, go_on, log = threading.Event(), threading.Event(), []

    def slow(start: int, stop: int) -> None:
        begun.set()
        go_on.wait(10)
        log.append(start)

    ahead = ReadAhead(executor, layer_groups(12), [silent(slow), silent(slow)])
    ahead.start()
    assert begun.wait(10)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go_on.set()
    closing.join(10)
    executor.submit(int).result()
    assert log == [0]


def test_an_error_is_of_its_group_alone(executor: ThreadPoolExecutor) -> None:
    def read(start: int, stop: int) -> int:
        if start == 4:
            raise ValueError("damaged")
        return start

    ahead = ReadAhead(executor, layer_groups(16), [silent(read)])
    assert ahead.take(0) == [0]
    with pytest.raises(ValueError, match="damaged"):
        ahead.take(5)
    assert ahead.take(12) == [12]
    ahead.close()


def test_with_nothing_to_read_everything_is_there(executor: ThreadPoolExecutor) -> None:
    ahead: ReadAhead[int] = ReadAhead(executor, layer_groups(6, resident=True), [])
    ahead.start()
    assert ahead.is_read(5)
    assert ahead.take(3) == []
    assert ahead.group(3) == range(6)
    assert ahead.layers == list(range(6))
    ahead.close()


def test_without_threads_layers_are_announced_and_read_when_they_are_due() -> None:
    log: Log = []
    ahead = ReadAhead(None, layer_groups(20), [noted(log, "a"), noted(log, "b")])
    ahead.start()
    assert log == [("a!", 0), ("b!", 0)]
    assert ahead.is_read(0)
    assert ahead.take(1) == [("a", range(4)), ("b", range(4))]
    assert log[2:] == [("a!", 4), ("b!", 4), ("a", 0), ("b", 0)]
    ahead.take(4)
    assert log[6:] == [("a!", 12), ("b!", 12), ("a", 4), ("b", 4)]
    ahead.close()


def test_threads_are_for_cores_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_kv_llm.online.read_ahead.available_cores", lambda: 8)
    found = []
    for threads in (8, 7, 6, 2, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(reader_threads(torch.device("cpu")))
    assert found == [0, 1, 2, 4, 0]
    assert reader_threads(torch.device("cuda")) == 4
    monkeypatch.setattr("fused_kv_llm.online.read_ahead.CAN_ANNOUNCE", False)
    assert reader_threads(torch.device("cpu")) == 4


def test_a_layer_is_read_when_all_its_reads_are(executor: ThreadPoolExecutor) -> None:
    go_on = threading.Event()
    ahead = ReadAhead(executor, layer_groups(4), [silent(lambda *_: None), silent(lambda *_: go_on.wait(10))])
    assert not ahead.is_read(0)
    ahead.start()
    assert not ahead.is_read(0)
    go_on.set()
    ahead.take(0)
    assert ahead.is_read(0)
    ahead.close()
