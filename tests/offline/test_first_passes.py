"""Chunks get their first pass before others get their second: only the first is waited for by questions."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from waiting import exit_status, wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import PrefixKV, StoppedError
from fused_kv_llm.offline import first_passes, prefill, prompt_prefill
from fused_kv_llm.offline.first_passes import AfterFirstPasses, FirstPasses, first_passes_of

OLD = SHORT[:8]
NEW = [f"{text} So says number {number}." for number in range(3) for text in SHORT[:8]]
GRAPH = {text: [other for other in OLD if other != text] for text in OLD}


def variants_of(engine: FusedKVEngine, text: str) -> int:
    key = engine.chunk_id(text)
    if key is None or engine.corpus.variants is None:
        raise AssertionError
    return len(engine.corpus.variants.names(key))


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
    note(prompt_prefill, "forward_kv", "second")
    monkeypatch.setattr(prefill, "BATCH_TOKENS", 1)
    monkeypatch.setattr(prompt_prefill, "_PIECE_TOKENS", 8)
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
    # While the new chunks are looked up, before their first pass begins, the second one goes on.
    first, *_, last = (number for number, name in enumerate(forwards) if name == "first" and number >= begun)
    assert forwards[first : last + 1].count("first") == len(NEW)
    # One may have been under way, and one handed over, when it began.
    assert forwards[first : last + 1].count("second") <= 2
    one.wait_for_background()
    assert forwards[last:].count("second") > 2, "it goes on afterwards"
    assert one.build_kv_cache(OLD, preprocess="later", progress=False).chunks_pending == (0 if one is not other else 24)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when something has waited for first passes in vain for a while; to be cleared to ask again."""
    found, real = threading.Event(), FirstPasses.wait

    def noting(passes: FirstPasses, stopped: Callable[[], bool]) -> None:
        def asked() -> bool:
            found.set()
            return stopped()

        real(passes, asked)

    monkeypatch.setattr(FirstPasses, "wait", noting)
    return found


@pytest.fixture
def one(tmp_path: Path) -> Iterator[FusedKVEngine]:
    options: dict[str, Any] = {"num_neighbours": 3, "variants": 2}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as made:
        yield made


def test_an_engine_that_waits_can_be_closed(one: FusedKVEngine, forwards: list[str], waiting: threading.Event) -> None:
    with first_passes_of(one.model).under_way():
        one.build_kv_cache(OLD, neighbours=GRAPH, progress=False)
        assert waiting.wait(10)
        one.close()
    assert "second" not in forwards


def test_missed_chunks_do_not_wait_with_a_second_pass(
    one: FusedKVEngine, forwards: list[str], waiting: threading.Event
) -> None:
    with first_passes_of(one.model).under_way():
        one.build_kv_cache(OLD, neighbours=GRAPH, progress=False)
        for missed in SHORT[20:23]:
            # The second time its last round has been fruitless.
            waiting.clear()
            assert waiting.wait(10)
            one.prefetch([missed])
            one.generate(rag_prompt([missed]), max_tokens=1)
            wait_until(lambda text=missed: one.chunk_id(text) is not None)  # type: ignore[misc]
    one.wait_for_background()
    assert one.build_kv_cache(OLD, preprocess="later", progress=False).chunks_pending == 0


def test_variants_wait_and_lose_nothing_to_missed_chunks(one: FusedKVEngine, waiting: threading.Event) -> None:
    one.build_kv_cache(OLD, neighbours=GRAPH, preprocess="wait", progress=False)
    with first_passes_of(one.model).under_way():
        one.generate(rag_prompt(OLD[:3]), max_tokens=1)
        assert waiting.wait(10)
        one.prefetch(SHORT[20:21])
        one.generate(rag_prompt(SHORT[20:21]), max_tokens=1)
        wait_until(lambda: one.chunk_id(SHORT[20]) is not None)
        assert variants_of(one, OLD[1]) == 0
    one.wait_for_background()
    assert variants_of(one, OLD[1]) == 1


def test_a_piece_is_as_large_as_may_be_after_the_wait(one: FusedKVEngine) -> None:
    passes, sizes = first_passes_of(one.model), []

    class Owner:
        def piece_tokens(self, most: int, speed: object) -> int:
            sizes.append(passes.are_under_way)
            return most

    after = AfterFirstPasses(Owner(), passes, lambda: False)  # type: ignore[arg-type]
    with passes.under_way():
        asking = threading.Thread(target=after.piece_tokens, args=[8], daemon=True)
        asking.start()
        asking.join(0.2)
        assert asking.is_alive()
    asking.join(10)
    assert sizes == [False]


def test_another_model_is_not_waited_for(one: FusedKVEngine, forwards: list[str]) -> None:
    with first_passes_of(tiny_model()).under_way():
        one.build_kv_cache(OLD, neighbours=GRAPH, preprocess="wait", progress=False)
    assert "second" in forwards


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


def test_who_waits_lets_its_openmp_workers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, released = FirstPasses(), list[bool]()
    monkeypatch.setattr(first_passes, "release_openmp_workers", lambda: released.append(True))
    passes.wait(lambda: True)
    assert released == [], "nothing is waited for"
    with passes.under_way(), pytest.raises(StoppedError):
        passes.wait(lambda: True)
    assert released == [True]


def test_within_another_first_pass_there_may_be_one() -> None:
    passes = FirstPasses()
    with passes.under_way():
        with passes.under_way():
            pass
        assert passes.are_under_way
    assert not passes.are_under_way


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_waits_for_none_of_its_parents() -> None:
    model, child = tiny_model(), 0
    try:
        with first_passes_of(model).under_way():
            child = os.fork()
            if not child:
                first_passes_of(model).wait(lambda: True)
        if not child:
            # It has left the pass of its parent, and begins one of its own.
            with first_passes_of(model).under_way(), suppress(StoppedError):
                first_passes_of(model).wait(lambda: True)
                os._exit(2)
            first_passes_of(model).wait(lambda: True)
            os._exit(0)
    finally:
        if not child:
            os._exit(1)
    assert exit_status(child, 30) == 0
