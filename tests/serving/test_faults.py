"""Steps that fail: requests are tried again and give the answer they would have given, or end with a clear error."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from corpus import SHORT, rag_prompt
from held_memory import caches_in_use
from models import smollm2_tokenizer, tiny_model
from torch import Tensor
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError, DeadlineError, StepFailedError
from fused_kv_llm.kv import HostLevel, PrefixTree, RankedEviction
from fused_kv_llm.online import fusion
from fused_kv_llm.serving import StepLoop, means
from fused_kv_llm.serving.scheduler import Scheduler

PROMPTS = [rag_prompt(SHORT[at : at + 3], "Which ferry is the largest?") for at in range(4)]
SAMPLED = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 11}
GREEDY = {"max_tokens": 24}


def make_engine(folder: Path, **options: Any) -> FusedKVEngine:
    options = {"prefix_cache_bytes": 0, "store_misses": False, "recompute_ratio": 0.3, **options}
    return FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32", preprocessing="none", **options
    )


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    with make_engine(tmp_path) as made:
        made.build_kv_cache(SHORT[:6], progress=False)
        yield made


def loop_of(engine: FusedKVEngine) -> StepLoop:
    return engine.requests._loop


def nothing_is_left(engine: FusedKVEngine) -> None:
    wait_until(lambda: not loop_of(engine).scheduler.requests())
    assert not caches_in_use(engine)
    with engine.requests.prefixes._lock:
        assert all(not node.pins for node in engine.requests.prefixes._root.below())


class Steps:
    """Forwards that fail where `fails` says so, given the number of the forward and its parts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int, Sequence[Any]], bool]) -> None:
        self.number, self.failed, self.sizes, self.fails = 0, 0, list[int](), fails
        self._run = means.forward_ragged
        monkeypatch.setattr(means, "forward_ragged", self)

    def __call__(self, loaded: Any, parts: Sequence[Any]) -> list[Tensor]:
        self.number += 1
        self.sizes.append(len(parts))
        if self.fails(self.number, parts):
            self.failed += 1
            # Something may have been written by then.
            for part in parts:
                for layer in part.cache.layers[:1]:
                    layer.keys[:, :, part.forward_pass.rows] = 7.0
            raise MemoryError("no memory for this step")
        return self._run(loaded, parts)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("times", [1, 2])
def test_an_answer_goes_on_after_a_failed_step(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], times: int
) -> None:
    want = engine.generate(PROMPTS[0], **options)
    steps = Steps(monkeypatch, lambda number, parts: 5 <= number < 5 + times)
    got = engine.submit(PROMPTS[0], **options)
    pieces = list(got.pieces())
    assert steps.failed == times
    assert [piece.token_id for piece in pieces] == want.token_ids
    assert "".join(piece.text for piece in pieces) == want.text
    report = pieces[-1].report
    assert report is not None
    assert report.retries == times
    # The prompt is counted once however often it was computed.
    assert report.prompt_tokens == want.report.prompt_tokens
    assert report.chunks_found == want.report.chunks_found
    nothing_is_left(engine)


def test_the_first_retry_computes_one_row_and_the_second_one_all_tokens_that_were_sent(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list[int]()

    def fails(number: int, parts: Sequence[Any]) -> bool:
        rows.append(parts[0].ids.shape[0])
        return number in (5, 6)

    Steps(monkeypatch, fails)
    engine.generate(PROMPTS[0], max_tokens=12)
    decoding = rows[: rows.index(5) + 2] if 5 in rows else rows
    assert decoding[-5:] == [1, 1, 1, 5, 1]
    assert rows.count(1) == len(rows) - 1


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_a_constraint_sees_every_answer_once(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    seen = list[int]()

    def constraint(ids: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(len(ids))
        masked = logits.clone()
        masked[: 100 * len(ids)] = -float("inf")
        return masked

    options: dict[str, Any] = {**SAMPLED, "recompute_ratio": ratio, "constraint": constraint}
    want = engine.generate(PROMPTS[1], **options)
    seen.clear()
    Steps(monkeypatch, lambda number, parts: number in (3, 4, 9))
    got = engine.generate(PROMPTS[1], **options)
    assert got.token_ids == want.token_ids
    assert seen == list(range(len(want.token_ids)))


@pytest.mark.parametrize("where", ["begin", "advance", "plan"])
def test_a_request_that_fails_before_its_first_token_begins_anew(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    want = engine.generate(PROMPTS[0], **GREEDY)
    before = uses(engine)
    engine.generate(PROMPTS[0], **GREEDY)
    once = uses(engine) - before
    fail_at(monkeypatch, engine, where, 1)
    got = engine.generate(PROMPTS[0], **GREEDY)
    assert got.token_ids == want.token_ids
    assert got.report.retries == 1
    if where != "plan":
        assert uses(engine) - before == 2 * once > 0
    nothing_is_left(engine)


def uses(engine: FusedKVEngine) -> int:
    return sum(engine.store.counters().hits.values())


def fail_at(monkeypatch: pytest.MonkeyPatch, engine: FusedKVEngine, where: str, times: int) -> list[str]:
    """Have a part of a request's way fail so many times; return what is noted of it."""
    failed = list[str]()
    owner: Any = {"plan": engine.requests.planner, "advance": fusion, "begin": fusion.Fusion}[where]
    name = "forward_rows" if where == "advance" else where
    run = getattr(owner, name)

    def run_or_fail(*args: Any, **options: Any) -> Any:
        found = run(*args, **options)
        if len(failed) < times:
            failed.append(where)
            if where == "plan":
                found.close()
            raise RuntimeError("a kernel has failed")
        return found

    monkeypatch.setattr(owner, name, run_or_fail)
    return failed


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("where", ["step", "advance"])
def test_after_the_last_retry_the_error_says_how_often_it_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, where: str
) -> None:
    with make_engine(tmp_path, max_step_retries=most) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        if where == "step":
            Steps(monkeypatch, lambda number, parts: number >= 4)
        else:
            fail_at(monkeypatch, engine, where, 1000)
        handle = engine.submit(PROMPTS[0], **GREEDY)
        with pytest.raises(StepFailedError, match=rf" {most + 1} times in a row \(max_step_retries={most}\)") as caught:
            handle.result()
        assert isinstance(caught.value.__cause__, MemoryError if where == "step" else RuntimeError)
        monkeypatch.undo()
        assert engine.requests.recovery.failed == 1
        assert engine.requests.recovery.retries == most
        nothing_is_left(engine)
        assert engine.generate(PROMPTS[0], **GREEDY).token_ids


def test_who_is_at_fault_is_found_and_the_others_go_on(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_tokens": 200}
    want = [engine.generate(prompt, **options).token_ids for prompt in PROMPTS]
    bad = list[Any]()

    def fails(number: int, parts: Sequence[Any]) -> bool:
        if len(parts) == len(PROMPTS) and not bad:
            bad.append(parts[2].cache)
        return any(part.cache is bad[0] for part in parts) if bad else False

    steps = Steps(monkeypatch, fails)
    handles = [engine.submit(prompt, **options) for prompt in PROMPTS]
    got = [handle.result() for handle in handles]
    # A new cache is not at fault: the second time it begins anew.
    assert bad
    assert [one.token_ids for one in got] == want
    # Once together and twice alone.
    assert steps.failed <= 4
    nothing_is_left(engine)


def test_a_request_that_always_fails_leaves_the_others_alone(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_tokens": 120}
    lengths = {engine.generate(prompt, max_tokens=1).report.prompt_tokens: number
               for number, prompt in enumerate(PROMPTS)}  # fmt: skip
    want = [engine.generate(prompt, **options).token_ids for prompt in PROMPTS]
    cursed = engine.generate(PROMPTS[2], max_tokens=1).report.prompt_tokens
    assert len(lengths) == len(PROMPTS)

    def fails(number: int, parts: Sequence[Any]) -> bool:
        return any(part.cache.get_max_length() == cursed + 120 and part.cache.length >= cursed for part in parts)

    Steps(monkeypatch, fails)
    handles = [engine.submit(prompt, **options) for prompt in PROMPTS]
    for number, handle in enumerate(handles):
        if number == 2:
            with pytest.raises(StepFailedError):
                handle.result()
        else:
            assert handle.result().token_ids == want[number]
    nothing_is_left(engine)


@pytest.mark.parametrize("kind", ["constraint", "own error", "deadline"])
def test_what_is_the_callers_is_not_tried_again(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    calls = list[int]()

    def constraint(ids: Sequence[int], logits: Tensor) -> Tensor:
        calls.append(len(ids))
        if len(ids) == (0 if kind == "own error" else 3):
            raise KeyError("a grammar without a rule")
        return logits

    if kind == "deadline":
        Steps(monkeypatch, lambda number, parts: False)
        with pytest.raises(DeadlineError):
            engine.submit(PROMPTS[0], max_tokens=1500, timeout_s=0.2).result()
    else:
        with pytest.raises(KeyError):
            engine.generate(PROMPTS[0], max_tokens=8, constraint=constraint)
        assert calls == list(range(1 if kind == "own error" else 4))
    assert engine.requests.recovery.retries == 0
    nothing_is_left(engine)


def test_a_deadline_ends_the_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tmp_path, max_step_retries=10**9) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        steps = Steps(monkeypatch, lambda number, parts: number >= 4)
        with pytest.raises(DeadlineError):
            engine.submit(PROMPTS[0], max_tokens=20, timeout_s=0.5).result()
        assert steps.failed > 2
        nothing_is_left(engine)


def test_a_prompt_in_slices_goes_on_where_a_step_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tmp_path, max_batched_rows=8) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        want = [engine.generate(prompt, max_tokens=60).token_ids for prompt in PROMPTS[:2]]
        sliced = list[int]()

        def fails(number: int, parts: Sequence[Any]) -> bool:
            if len(parts) > 1 and parts[-1].ids.shape[0] > 1:
                sliced.append(number)
                return len(sliced) in (1, 3)
            return False

        steps = Steps(monkeypatch, fails)
        first = engine.submit(PROMPTS[0], max_tokens=60)
        first.wait_for_first()
        second = engine.submit(PROMPTS[1], max_tokens=60)
        assert [first.result().token_ids, second.result().token_ids] == want
        assert steps.failed >= 1
        nothing_is_left(engine)


def test_what_was_proposed_is_tried_again_too(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    want = engine.generate(PROMPTS[0], **GREEDY).token_ids
    failed = fail_at(monkeypatch, engine, "advance", 2)
    with engine.speculate(**GREEDY) as speculation:
        assert speculation.propose(PROMPTS[0])
        wait_until(lambda: len(failed) == 2)
        speculation.finish(PROMPTS[0])
    got = engine.generate(PROMPTS[0], **GREEDY)
    assert got.token_ids == want
    nothing_is_left(engine)


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_requests_go_on_after_the_devices_kv_was_lost(tmp_path: Path, options: dict[str, Any], ratio: float) -> None:
    with make_engine(tmp_path, recompute_ratio=ratio) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        options = {**options, "max_tokens": 60}
        want = [engine.generate(prompt, **options).token_ids for prompt in PROMPTS]
        host = HostLevel(2**30, Tensor.clone, Tensor.clone)
        engine.requests.prefixes = PrefixTree(2**30, RankedEviction("pgdsf"), host)
        for prompt in PROMPTS:
            engine.generate(prompt, max_tokens=2)
        assert engine.requests.prefixes.host_nbytes > 0 or ratio < 1
        # Three times: when nobody is answered, while they are being loaded or computed, and while all write.
        engine.requests.lose_device()
        handles = [engine.submit(prompt, **options) for prompt in PROMPTS]
        engine.requests.lose_device()
        for handle in handles:
            handle.wait_for_first()
        engine.requests.lose_device()
        got = [handle.result() for handle in handles]
        assert [one.token_ids for one in got] == want
        assert any(one.report.retries for one in got)
        assert engine.requests.recovery.lost_devices >= 1
        nothing_is_left(engine)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_every_request_ends_well_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    cases: list[dict[str, Any]] = [GREEDY, SAMPLED, {**GREEDY, "recompute_ratio": 1.0}, {"max_tokens": 1}]
    asked = [(dice.choice(PROMPTS), dice.choice(cases)) for _ in range(30)]
    # Engines of other tests may have theirs.
    before = set(threading.enumerate())
    with make_engine(tmp_path, prefix_cache_bytes="1MB", max_step_retries=1, max_num_seqs=6) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        want = [engine.generate(prompt, **options).token_ids for prompt, options in asked]
        fuse, plan = engine.requests.planner.plan, Scheduler._advance

        def planned(*args: Any, **options: Any) -> Any:
            if dice.random() < 0.1:
                raise OSError("the folder is away")
            return fuse(*args, **options)

        def advanced(*args: Any) -> Any:
            if dice.random() < 0.1:
                raise RuntimeError("a kernel has failed")
            return plan(*args)

        monkeypatch.setattr(engine.requests.planner, "plan", planned)
        monkeypatch.setattr(Scheduler, "_advance", advanced)
        steps = Steps(monkeypatch, lambda number, parts: dice.random() < 0.25)
        handles = [engine.submit(prompt, **options) for prompt, options in asked]
        ends = list[str]()
        for number, handle in enumerate(handles):
            try:
                assert handle.result().token_ids == want[number]
                ends.append("answer")
            except StepFailedError:
                ends.append("error")
        assert steps.failed
        assert ends.count("answer") > len(ends) // 2
        nothing_is_left(engine)
        monkeypatch.undo()
        assert [engine.generate(prompt, **options).token_ids for prompt, options in asked[:4]] == want[:4]
    after = set(threading.enumerate()) - before
    assert not [thread.name for thread in after if thread.name.startswith("fused-kv-read")]


def test_a_limit_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_step_retries=-1"):
        make_engine(tmp_path, max_step_retries=-1)
