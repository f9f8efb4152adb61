"""Requests that share the KV of their chunks: answers as alone, more of them at once, and nothing is left of them."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from waiting import unending, wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.engine.requests import RequestRunner
from fused_kv_llm.errors import ChunkDamagedError, ConfigError, FusedKVError
from fused_kv_llm.kv import ChunkPage
from fused_kv_llm.model import FusedCache, ViewCache
from fused_kv_llm.serving.served_request import RequestState, ServedRequest

QUESTIONS = [f"What about the ferries, question {number}?" for number in range(12)]
OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 30},
    {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"max_tokens": 12, "recompute_ratio": 0.0},
    {"max_tokens": 25, "recompute_ratio": 1.0},
    {"max_tokens": 20, "temperature": 1.2, "seed": 3, "selector": "qcfuse"},
    {"max_tokens": 16, "selector": "cacheblend"},
]


def make_engine(folder: Path, model: Any = None, **options: Any) -> FusedKVEngine:
    options = {"preprocessing": "similar", "recompute_ratio": 0.15, "store_misses": False,
               "prefix_cache_bytes": 0, **options}  # fmt: skip
    engine = FusedKVEngine(
        model or tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32", **options
    )
    engine.build_kv_cache(SHORT[:6], preprocess="wait", progress=False)
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharing")


@pytest.fixture(scope="module")
def private(folder: Path) -> Iterator[FusedKVEngine]:
    with make_engine(folder, share_chunk_kv="never") as made:
        yield made


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[FusedKVEngine]:
    with make_engine(folder, share_chunk_kv="always", max_batched_rows=24) as made:
        yield made


def prompts(count: int) -> list[str]:
    """Return prompts of different lengths and chunks."""
    drawn = random.Random(count)
    return [rag_prompt(drawn.sample(SHORT[:6], 1 + number % 5), QUESTIONS[number]) for number in range(count)]


def nothing_is_left(engine: FusedKVEngine) -> None:
    wait_until(lambda: not engine.requests._loop.scheduler.requests())
    pages = engine.requests.context.pages
    assert pages is not None
    wait_until(lambda: len(pages) == 0)


@pytest.mark.parametrize("at_once", [False, True])
def test_answers_are_those_of_private_copies(private: FusedKVEngine, shared: FusedKVEngine, at_once: bool) -> None:
    asked = [(prompt, OPTIONS[number % len(OPTIONS)]) for number, prompt in enumerate(prompts(12))]
    want = [private.generate(prompt, **options) for prompt, options in asked]
    if at_once:
        got = [one.result() for one in [shared.submit(prompt, **options) for prompt, options in asked]]
    else:
        got = [shared.generate(prompt, **options) for prompt, options in asked]
    for one, other, (_, options) in zip(want, got, asked, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        assert one.report.shared_kv_bytes == 0
        assert not one.report.not_shared
        reuses = options.get("recompute_ratio") != 1.0
        narrows = options.get("selector") == "cacheblend"
        assert (other.report.shared_kv_bytes > 0) == (reuses and not narrows)
        assert ("cacheblend" in other.report.not_shared) == narrows
    nothing_is_left(shared)


def test_a_further_request_takes_two_fifths_of_a_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, take = list[int](), ServedRequest.take

    def noted(self: ServedRequest, *args: Any) -> None:
        take(self, *args)
        buffers.append(self.answer.prompt.cache._buffer.nbytes)

    monkeypatch.setattr(ServedRequest, "take", noted)
    reports = {}
    for how in ("never", "always"):
        with make_engine(folder, share_chunk_kv=how) as engine:
            asked = [engine.submit(rag_prompt(SHORT[:6], question), max_tokens=30) for question in QUESTIONS[:4]]
            reports[how] = [one.result().report for one in asked]
    own = {how: [report.own_kv_bytes for report in found] for how, found in reports.items()}
    assert max(own["always"]) <= 0.4 * min(own["never"])
    assert max(buffers[4:]) <= 0.4 * min(buffers[:4])
    # All see the same pages.
    assert len({report.shared_kv_bytes for report in reports["always"]}) == 1


def buffers(kind: type[FusedCache]) -> int:
    return sum(thing._buffer.nbytes for thing in gc.get_objects() if type(thing) is kind and thing._buffer is not None)


@pytest.mark.parametrize("how", ["never", "auto", "always"])
def test_sharing_lets_more_run_at_once(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for four private copies; the reports say what was shared."""
    most, write = 0, ServedRequest._write

    def counted(self: ServedRequest, *args: Any) -> None:
        nonlocal most
        write(self, *args)
        scheduler, pages = engine.requests._loop.scheduler, engine.requests.context.pages
        running = scheduler._running
        # What each holds, and every page once.
        assert scheduler._kv.nbytes == sum(one.kv_nbytes for one in running) + (0 if pages is None else pages.nbytes)
        most = max(most, sum(one.state is RequestState.DECODING for one in running))

    monkeypatch.setattr(ServedRequest, "_write", counted)
    with make_engine(folder, share_chunk_kv=how) as engine:
        asked = [rag_prompt(SHORT[:6], question) for question in QUESTIONS]
        want = [engine.generate(prompt, max_tokens=40).token_ids for prompt in asked[:2]]
    nbytes = private_nbytes(folder, asked[0])
    most = 0
    with make_engine(folder, share_chunk_kv=how, kv_pool_bytes=int(4.5 * nbytes), max_num_seqs=12) as engine:
        answers = [one.result() for one in [engine.submit(prompt, max_tokens=40) for prompt in asked]]
        assert [one.token_ids for one in answers[:2]] == want
        assert {one.report.shared_kv_bytes > 0 for one in answers} <= {how != "never", how == "always"}
        if engine.requests.context.pages is not None:
            nothing_is_left(engine)
    assert most <= 4 if how == "never" else most > 4


def private_nbytes(folder: Path, prompt: str) -> int:
    """Return the bytes that a prompt and an answer of 40 tokens take."""
    with make_engine(folder, share_chunk_kv="never") as engine:
        report = engine.generate(prompt, max_tokens=40).report
        loaded = engine.loaded
        return (report.prompt_tokens + 40) * loaded.geometry.kv_bytes_per_token(loaded.dtype)


def test_a_request_with_room_keeps_its_copy(folder: Path) -> None:
    with make_engine(folder, kv_pool_bytes="1GiB") as engine:
        answers = [one.result() for one in [engine.submit(prompt, max_tokens=20) for prompt in prompts(6)]]
        assert not any(one.report.shared_kv_bytes or one.report.not_shared for one in answers)


def test_tenants_share_no_page(folder: Path, tmp_path: Path) -> None:
    model = tiny_model()
    with (
        make_engine(tmp_path, model, share_chunk_kv="always", tenant="one") as one,
        make_engine(tmp_path, model, share_chunk_kv="always", tenant="other") as other,
    ):
        handles = [engine.submit(rag_prompt(SHORT[:3]), max_tokens=1500, constraint=unending)
                   for engine in (one, other, one)]  # fmt: skip
        for handle in handles:
            handle.wait_for_first()
        # The first token comes before a request shares.
        scheduler = one.requests._loop.scheduler
        wait_until(lambda: all(type(running.answer.prompt.cache) is ViewCache for running in scheduler._running))
        pools = [engine.requests.context.pages for engine in (one, other)]
        with one.model_lock:
            keys = [set(pool._pages) for pool in pools]
            chunks = [{id(view.chunk.keys) for view in running.answer.prompt.cache.view.chunks}
                      for running in one.requests._loop.scheduler._running]  # fmt: skip
        assert not any(handle.done for handle in handles)
        for handle in handles:
            handle.cancel()
        assert [len(found) for found in keys] == [3, 3]
        assert not keys[0] & keys[1]
        # The two requests of one tenant do share them.
        assert sorted(len(mine & its) for mine in chunks for its in chunks if mine is not its) == [0, 0, 0, 0, 3, 3]
        for engine in (one, other):
            nothing_is_left(engine)


def test_nothing_is_left_after_random_ends(folder: Path) -> None:
    drawn = random.Random(5)
    with make_engine(folder, share_chunk_kv="always", max_num_seqs=5) as engine:
        for _ in range(6):
            handles = [engine.submit(prompt, max_tokens=60, timeout_s=drawn.choice([None, 0.05, 0.2]))
                       for prompt in prompts(10)]  # fmt: skip

            def leave(handle: Any) -> None:
                pieces = handle.pieces()
                try:
                    for _ in range(drawn.randint(0, 12)):
                        next(pieces, None)
                except FusedKVError:
                    pass
                handle.cancel()

            threads = [threading.Thread(target=leave, args=(handle,)) for handle in handles]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            nothing_is_left(engine)
            assert buffers(ViewCache) == 0
    assert engine.requests.context.pages.nbytes == 0


def test_a_page_that_cannot_be_read_leaves_the_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(folder, share_chunk_kv="always") as engine:
        want = engine.generate(prompts(3)[2], max_tokens=10)

        def broken(self: ChunkPage, stored: Any) -> None:
            raise ChunkDamagedError(stored.key, "its disk is gone")

        monkeypatch.setattr(ChunkPage, "__init__", broken)
        answer = engine.generate(prompts(3)[2], max_tokens=10)
        assert answer.token_ids == want.token_ids
        assert "its disk is gone" in answer.report.not_shared
        assert (answer.report.shared_kv_bytes, want.report.not_shared) == (0, "")
        nothing_is_left(engine)


def test_what_a_request_that_shared_leaves_is_its_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own rows are no prompt: a second turn goes on from what it left before it shared."""
    found, left, keep = [], list[type](), RequestRunner.keep

    def noted(self: RequestRunner, kept: Any, cache: FusedCache) -> None:
        left.append(type(cache))
        keep(self, kept, cache)

    monkeypatch.setattr(RequestRunner, "keep", noted)
    for how in ("never", "always"):
        with make_engine(folder, share_chunk_kv=how) as engine:
            first = engine.generate(rag_prompt(SHORT[:4]), max_tokens=20)
            answers = [engine.generate(rag_prompt(SHORT[:4]), max_tokens=20) for _ in range(2)]
            assert (first.report.shared_kv_bytes > 0) == (how == "always")
            found.append([first.token_ids, *(one.token_ids for one in answers)])
    assert found[0] == found[1]
    assert set(left) == {FusedCache}


def test_a_model_that_cannot_share_says_so(tmp_path: Path) -> None:
    model = tiny_model("mistral", sliding_window=64)
    with make_engine(tmp_path, model, share_chunk_kv="always") as engine:
        report = engine.generate(prompts(3)[2], max_tokens=5).report
        assert "window" in report.not_shared
        assert report.shared_kv_bytes == 0
        assert engine.requests.context.pages is None


def test_an_unknown_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"share_chunk_kv='sometimes' .* 'auto', 'always' or 'never'"):
        make_engine(tmp_path, share_chunk_kv="sometimes")
