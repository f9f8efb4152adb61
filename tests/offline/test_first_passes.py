"""Chunks get their first pass before others get their second: only the first is waited for by questions."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model
from waiting import exit_status, wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import PrefixKV, StoppedError
from fused_kv_llm.offline import prefill, true_kv
from fused_kv_llm.offline.first_passes import FirstPasses, first_passes_of

OLD = SHORT[:8]
NEW = [f"{text} So says number {number}." for number in range(3) for text in SHORT[:8]]
GRAPH = {text: [other for other in OLD if other != text] for text in OLD}


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes whose forwards were computed, in order; those of the first have one chunk each."""
    found: list[str] = []

    def note(module: Any, function: str, name: str) -> None:
        real = getattr(module, function)

        def noting(*arguments: Any) -> Any:
            found.append(name)
            return real(*arguments)

        monkeypatch.setattr(module, function, noting)

    note(prefill, "prefill_packed", "first")
    note(true_kv, "forward_kv", "second")
    monkeypatch.setattr(prefill, "BATCH_TOKENS", 1)
    monkeypatch.setattr(true_kv, "_PIECE_TOKENS", 8)
    return found


@pytest.fixture(params=["the same engine", "another tenant's"])
def engines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[FusedKVEngine, FusedKVEngine]]:
    """The engine with chunks for the second pass, and the one with new chunks."""
    model = tiny_model()
    options: dict[str, Any] = {"tokenizer": smollm2_tokenizer(), "store_misses": False, "num_neighbours": 3}
    with FusedKVEngine(model, kv_dir=tmp_path, **options) as first:
        if request.param == "the same engine":
            yield first, first
        else:
            with FusedKVEngine(model, kv_dir=tmp_path, tenant="other", **options) as second:
                yield first, second


def test_a_second_pass_under_way_lets_first_passes_go_before_it(
    engines: tuple[FusedKVEngine, FusedKVEngine], forwards: list[str]
) -> None:
    one, other = engines
    one.build_kv_cache(OLD, neighbours=GRAPH, progress=False)
    wait_until(lambda: forwards.count("second") > 3)
    begun = len(forwards)
    other.build_kv_cache(NEW, preprocess="later", progress=False)
    last = max(number for number, name in enumerate(forwards) if name == "first")
    assert forwards[begun : last + 1].count("first") == len(NEW)
    # One may have been under way, and one handed over, when the ingestion began.
    assert forwards[begun : last + 1].count("second") <= 2
    one.wait_for_background()
    assert forwards[last:].count("second") > 2, "it goes on afterwards"
    assert one.build_kv_cache(OLD, preprocess="later", progress=False).chunks_pending == (0 if one is not other else 24)


def test_an_engine_that_waits_for_another_one_can_be_closed(
    engines: tuple[FusedKVEngine, FusedKVEngine], forwards: list[str]
) -> None:
    one, _ = engines
    with first_passes_of(one.model).under_way():
        one.build_kv_cache(OLD, neighbours=GRAPH, progress=False)
        one.close()
    assert "second" not in forwards


def test_a_first_pass_that_fails_is_over(
    engines: tuple[FusedKVEngine, FusedKVEngine], forwards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = engines

    def failing(loaded: Any, chunks: Any, prefix: PrefixKV) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(prefill, "prefill_packed", failing)
        with pytest.raises(MemoryError):
            other.build_kv_cache(NEW, progress=False)
    one.build_kv_cache(OLD, neighbours=GRAPH, preprocess="wait", progress=False)
    assert "second" in forwards


def test_several_under_way_are_all_waited_for() -> None:
    passes, asked = FirstPasses(), threading.Event()

    def stopped() -> bool:
        asked.set()
        return False

    waiting = threading.Thread(target=passes.wait, args=[stopped], daemon=True)
    with passes.under_way():
        with passes.under_way():
            waiting.start()
            assert asked.wait(10)
        asked.clear()
        assert asked.wait(10), "one has ended, the other has not"
        with pytest.raises(StoppedError):
            passes.wait(lambda: True)
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_waits_for_none_of_its_parents() -> None:
    model = tiny_model()
    with first_passes_of(model).under_way():
        child = os.fork()
        if not child:
            try:
                first_passes_of(model).wait(lambda: True)
                os._exit(0)
            finally:
                os._exit(1)
        assert exit_status(child, 30) == 0
