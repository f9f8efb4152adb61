"""The simulation runs the library's classes, keeps what it must keep, and learns from a run of the real engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corpus import SHORT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model
from simulation import compare, measured
from simulation.clock import Clock
from simulation.costs import Costs, Work, fitted, roofline
from simulation.engine import Setup, SimulatedEngine
from simulation.hardware import ASSUMED, GB, Hardware
from simulation.predict import predict, prediction_tables, setup
from simulation.report import hit_rates, times
from simulation.reuse import work_of
from simulation.shape import SEVEN_B, SEVENTY_B, SMOLLM2
from simulation.trace import Trace, poisson, zipf

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import StepFailedError
from fused_kv_llm.kv import PrefixTree, RankedEviction
from fused_kv_llm.kv.prefix_levels import PrefixLevels
from fused_kv_llm.online import loading_depth
from fused_kv_llm.serving import RequestState, scheduler
from fused_kv_llm.serving.running_kv import RunningKV
from fused_kv_llm.serving.waiting import WaitingRequests
from fused_kv_llm.store.budget import DiskBudget
from fused_kv_llm.store.index import policies
from fused_kv_llm.store.read.memory import MemoryTier

TRACE = zipf(1.0, 200, 60, 4.0, k=5, answer_tokens=16)
# Room for some fifty chunks in memory and a hundred on the disk.
SMALL: dict[str, Any] = {"host_bytes": 13 * GB, "disk_bytes": 26 * GB}
NOWHERE: dict[str, Any] = {**SMALL, "remote": None}


def answered(one: Setup, trace: Trace = TRACE) -> tuple[dict[str, float], SimulatedEngine]:
    engine = SimulatedEngine(one, trace)
    found = times(engine.open_loop())
    engine.close()
    return found, engine


def token_s(engine: SimulatedEngine) -> list[list[float]]:
    return [request.token_s for request in engine.requests]


def test_shapes() -> None:
    assert (SMOLLM2.kv_bytes_per_token, SEVEN_B.kv_bytes_per_token, SEVENTY_B.kv_bytes_per_token) == (
        23_040, 524_288, 327_680,
    )  # fmt: skip
    # A prompt that is long enough is bound by operations, a token of an answer by bytes.
    costs = roofline(SEVEN_B, ASSUMED)
    long, one = work_of(4000, 64, 4064), Work(1, 100)
    assert costs.prompt_s(long) > 20 * costs.prompt_s(one)
    assert costs.prompt_s(one) == pytest.approx(costs.weights_s + costs.pass_s, rel=0.01)


@pytest.mark.parametrize("how", ["full", "prefix", "fused"])
def test_every_request_is_answered_and_the_same_seed_gives_the_same(how: str) -> None:
    found, engine = answered(setup("7B", how, **SMALL))
    again, other = answered(setup("7B", how, **SMALL))
    assert found == again
    assert token_s(engine) == token_s(other)
    assert len(engine.requests) == 60
    for request, asked in zip(engine.requests, TRACE.asked, strict=True):
        assert request.state is RequestState.DONE
        assert len(request.token_s) == asked.answer_tokens
        assert asked.at_s <= request.arrived_s + 1e-9
        assert request.token_s == sorted(request.token_s)
        assert request.token_s[0] > request.arrived_s
    assert zipf(1.0, 200, 60, 4.0, seed=2).asked != TRACE.asked


def test_time_does_not_go_back() -> None:
    engine = SimulatedEngine(setup("7B", "full"), TRACE)
    with pytest.raises(ValueError, match="time goes forward"):
        Clock(engine.env).spend(-1.0)


@settings(max_examples=15)
@example(host=3, disk=30, pool=20, how="fused", remote=True, policy="lru")
@example(host=3, disk=0, pool=5, how="prefix", remote=False, policy="gdsf")
@given(
    host=st.integers(0, 30), disk=st.integers(0, 30), pool=st.integers(1, 20),
    how=st.sampled_from(["prefix", "fused"]), remote=st.booleans(), policy=st.sampled_from(sorted(policies.POLICIES)),
)  # fmt: skip
def test_no_tier_holds_more_than_it_may(host: int, disk: int, pool: int, how: str, remote: bool, policy: str) -> None:
    changed: dict[str, Any] = {} if remote else {"remote": None}
    one = setup("7B", how, policy=policy, host_bytes=host * GB, disk_bytes=disk * GB, **changed)
    one = replace(one, limits=replace(one.limits, pool_bytes=pool * GB, prefix_bytes=pool * GB))
    engine = SimulatedEngine(one, zipf(1.0, 60, 25, 4.0, k=4, answer_tokens=4))
    step, looked = engine.scheduler.step, 0

    def watched() -> None:
        nonlocal looked
        step()
        looked += 1
        running = engine.scheduler._running
        assert len(running) <= 1 or RunningKV(running, []).nbytes <= pool * GB
        if engine.tiers is not None:
            assert engine.tiers.memory.usage()[1] <= host * GB
            assert engine.tiers.disk_nbytes <= disk * GB
        else:
            tree = engine.reuse.tree  # type: ignore[attr-defined]
            assert tree.nbytes <= tree.max_bytes
            assert tree.host_nbytes <= tree._levels._host.max_bytes if host else tree.host_nbytes == 0

    engine.scheduler.step = watched  # type: ignore[method-assign]
    assert all(len(request.token_s) == 4 for request in engine.open_loop())
    engine.close()
    assert looked > 25


def test_an_error_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "tokens_s", lambda self, answers, keys: 1 / 0)
    with pytest.raises(StepFailedError, match="ZeroDivisionError"):
        answered(setup("7B", "full"))


def test_what_has_no_room_is_computed() -> None:
    nothing = setup("7B", "fused", host_bytes=0, disk_bytes=0, remote=None)
    _, engine = answered(nothing)
    assert hit_rates(engine) == {"missed": 1.0}
    assert [one.computed_tokens for one in engine.requests] == [TRACE.prompt_tokens(one) for one in TRACE.asked]
    _, prefixes = answered(replace(setup("7B", "prefix"), limits=replace(nothing.limits, prefix_bytes=0)))
    full, all_of_it = answered(setup("7B", "full"))
    assert [one.computed_tokens for one in prefixes.requests] == [one.computed_tokens for one in all_of_it.requests]
    assert hit_rates(prefixes) == {"prefix": 0.0}
    # Whoever has everything in memory answers sooner; ratio 1 reuses nothing.
    fused, warm = answered(setup("7B", "fused"))
    assert fused["ttft_mean_s"] < full["ttft_mean_s"]
    assert sum(one.computed_tokens for one in warm.requests) < 0.25 * sum(
        one.computed_tokens for one in all_of_it.requests
    )
    _, ratio_1 = answered(setup("7B", "fused", ratio=1.0))
    assert [one.computed_tokens for one in ratio_1.requests] == [one.computed_tokens for one in all_of_it.requests]


def test_missed_chunks_are_stored_beside_requests() -> None:
    empty = setup("7B", "fused", is_filled=False, remote=None)
    _, engine = answered(empty)
    rates = hit_rates(engine)
    assert 0.1 < rates["missed"] < 0.9
    assert rates["memory"] + rates["disk"] == pytest.approx(1 - rates["missed"])


def test_a_slow_disk_is_waited_for() -> None:
    slow = replace(ASSUMED.disk, bytes_per_s=1 * GB)
    found, engine = answered(setup("7B", "fused", host_bytes=0, disk=slow))
    fast, _ = answered(setup("7B", "fused", host_bytes=0))
    assert found["ttft_mean_s"] > fast["ttft_mean_s"]
    read = engine.loader.bytes_read["disk"]
    assert read == sum(
        sum(TRACE.chunk_tokens[chunk] for chunk in asked.chunks) for asked in TRACE.asked
    ) * SEVEN_B.kv_bytes_per_token  # fmt: skip
    # Nobody has read faster than the disk.
    assert found["wall_s"] >= read / (1 * GB) * 0.99


# -- the library's own classes ---------------------------------------------------------------------------------------


def test_parts_are_the_librarys() -> None:
    fused, prefix = (SimulatedEngine(setup("7B", how), TRACE) for how in ("fused", "prefix"))
    assert type(fused.scheduler) is scheduler.Scheduler
    assert type(fused.scheduler.waiting) is WaitingRequests
    assert fused.tiers is not None
    assert (type(fused.tiers.memory), type(fused.tiers._budget)) == (MemoryTier, DiskBudget)
    tree = prefix.reuse.tree  # type: ignore[attr-defined]
    assert (type(tree), type(tree._levels), type(tree._eviction)) == (PrefixTree, PrefixLevels, RankedEviction)
    fused.close()


def test_the_stores_policies_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hit_rates(answered(setup("7B", "fused", policy="lru", **NOWHERE))[1])
    lfu = hit_rates(answered(setup("7B", "fused", policy="lfu", **NOWHERE))[1])
    assert lfu != before
    monkeypatch.setitem(policies.POLICIES, "lru", lambda entry, clock: -entry.used)
    after = hit_rates(answered(setup("7B", "fused", policy="lru", **NOWHERE))[1])
    assert after != before


def test_the_trees_ranking_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = zipf(1.4, 50, 120, 4.0, k=2, answer_tokens=2)
    small = setup("7B", "prefix", policy="lru", device_bytes=6 * GB, host_bytes=3 * GB)
    before = hit_rates(answered(small, trace)[1])
    monkeypatch.setattr(RankedEviction, "rank", lambda self, node, level: (node.num_tokens, -node.about.entry.used))
    assert hit_rates(answered(small, trace)[1]) != before


def test_the_queues_order_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    one = setup("7B", "fused", **NOWHERE)
    crowd = replace(TRACE, asked=[replace(asked, at_s=0.0) for asked in TRACE.asked])
    reordered, _ = answered(one, crowd)
    in_turn, _ = answered(replace(one, limits=replace(one.limits, reorder_window=0)), crowd)
    assert reordered["ttft_mean_s"] != in_turn["ttft_mean_s"]
    # Where nothing is cached they come in the order of arrival, but for who is read sooner of those planned at once.
    _, engine = answered(setup("7B", "full"), crowd)
    order = sorted(engine.requests, key=lambda request: request.token_s[0])
    assert all(abs(order.index(request) - place) <= 4 for place, request in enumerate(engine.requests))
    monkeypatch.setattr(WaitingRequests, "_before", lambda self, first: self._requests[-1])
    last_first, _ = answered(one, crowd)
    assert last_first["ttft_mean_s"] not in (reordered["ttft_mean_s"], in_turn["ttft_mean_s"])


def test_the_schedulers_shares_and_limits_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    one = setup("7B", "full")
    one = replace(one, costs=replace(one.costs, may_pause=True))
    before, _ = answered(one)
    with monkeypatch.context() as changed:
        changed.setattr(scheduler, "_SHARE_WHILE_OTHERS_WAIT", 0.5)
        changed.setattr(scheduler, "_SHARE_OF_ANSWERS", 0.5)
        assert answered(one)[0]["ttft_mean_s"] > before["ttft_mean_s"]
    few = replace(one, limits=replace(one.limits, num_seqs=1))
    assert answered(few)[0]["latency_mean_s"] != before["latency_mean_s"]


def test_the_loading_depth_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    # One after another, so that each is alone, from a disk that is slower than the model.
    trace = replace(TRACE, asked=[replace(asked, at_s=20.0 * at) for at, asked in enumerate(TRACE.asked[:20])])
    one = setup("7B", "fused", host_bytes=0, disk=replace(ASSUMED.disk, bytes_per_s=3 * GB))
    found, _ = answered(one, trace)
    asked = list[tuple[int, float, float]]()
    real = loading_depth

    def all_of_them(num_layers: int, load_s: float, compute_s: float) -> int:
        asked.append((num_layers, load_s, compute_s))
        return max(num_layers, real(num_layers, load_s, compute_s))

    monkeypatch.setattr("simulation.request.loading_depth", all_of_them)
    later, _ = answered(one, trace)
    assert asked
    assert later["ttft_mean_s"] > found["ttft_mean_s"]


# -- learning from a run ---------------------------------------------------------------------------------------------

KNOWN = Costs(0.02, 8e-4, 2e-7, 1e-5, 0.03, 1e-5, 0.02, 1e-3, 5e-7, 0.002, 3e-6, 0.007)


def test_costs_are_found_again() -> None:
    works = [
        work_of(ratio * tokens, 50 + tokens % 30, tokens + 80, tokens if ratio < 1 else 0)
        for tokens in (200, 700, 1500, 2600) for ratio in (0.0, 0.15, 0.3, 1.0)
    ]  # fmt: skip
    prompts = [
        {"rows": work.rows, "pairs": work.pairs, "placed": work.placed, "prompt_tokens": 300 + 100 * place,
         "fuse_s": KNOWN.prompt_s(work), "probe_s": KNOWN.probing_s(work.placed), "known_s": 1.0, "ttft_s": 1.007,
         "align_s": KNOWN.read_s + KNOWN.read_token_s * (300 + 100 * place)}
        for place, work in enumerate(works)
    ]  # fmt: skip
    steps = [
        {"answers": answers, "keys": keys, "step_s": KNOWN.tokens_s(answers, keys)}
        for answers, keys in ((1, 500), (1, 2000), (4, 6000), (8, 3000))
    ]
    found = fitted({"prompts": prompts, "steps": steps})
    assert list(found.to_dict().values()) == pytest.approx(list(KNOWN.to_dict().values()), rel=1e-6)
    # A cost is never negative: what would be is taken not to matter.
    for one in steps:
        one["step_s"] = 0.02 + 1e-3 * one["answers"] - 1e-7 * one["keys"]
    again = fitted({"prompts": prompts, "steps": steps})
    assert again.key_s == 0
    assert again.answer_s == pytest.approx(1e-3, rel=0.1)


def test_poisson() -> None:
    moments = poisson(4000, 2.0)
    assert moments[0] == 0
    assert moments == sorted(moments)
    assert moments[-1] / 4000 == pytest.approx(0.5, rel=0.05)


def test_a_run_of_the_real_engine_is_learnt_from_and_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "questions.jsonl"
    passages = [{"id": str(place), "title": "", "text": text} for place, text in enumerate(SHORT[:4])]
    asked = [{"id": f"q{n}", "question": f"Which ferry is number {n}?", "answers": ["Aldebaran"],
              "passages": passages[n % 3 :], "gold_passage_ids": []} for n in range(10)]  # fmt: skip
    data.write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    monkeypatch.setattr(measured, "PASSAGES", (1, 3))
    monkeypatch.setattr(measured, "STEPS", ((1, 1), (1, 2), (1, 3)))
    monkeypatch.setattr(measured, "STEP_TOKENS", 8)
    loads = {name: replace(load, requests=4, answer_tokens=4, passages=(2, 3), rate_per_s=load.rate_per_s and 20.0)
             for name, load in measured.LOADS.items()}  # fmt: skip
    for module in (measured, compare):
        monkeypatch.setattr(module, "LOADS", loads)
    options: dict[str, Any] = {"tokenizer": smollm2_tokenizer(), "kv_dir": tmp_path / "kv", "prefix_cache_bytes": 0}
    with FusedKVEngine(tiny_model(), **options) as engine:
        prompts = measured.Prompts(data, engine, 10)
        engine.build_kv_cache(prompts.passages, progress=False)
        record = measured.measured_run(engine, prompts)
    assert json.loads(json.dumps(record)) == record
    assert {one["turn"] for one in record["calibration"]["prompts"]} == {0, 1, 2}
    assert all(one["fuse_s"] <= one["ttft_s"] for one in record["calibration"]["prompts"])
    assert all(one["placed"] > 0 for one in record["calibration"]["prompts"] if one["ratio"] < 1)
    costs = compare.learnt(record, fitted(record["calibration"]))
    assert costs.beside >= 1
    record["costs"] = costs.to_dict()
    rows = compare.compare(record)
    assert {(row["load"], row["is_predicted"]) for row in rows} == {("open", False), ("closed", True)}
    assert all(row["measured"] > 0 and row["simulated"] > 0 for row in rows)
    assert compare.comparison_table(rows).row_count == 6


def test_the_recorded_run_is_predicted() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "simulation_cpu.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert compare.learnt(record, fitted(record["calibration"])).to_dict() == pytest.approx(record["costs"])
    predicted = [row for row in compare.compare(record) if row["is_predicted"]]
    assert [row["metric"] for row in predicted] == list(compare.METRICS)
    assert all(abs(row["error"]) < 0.15 for row in predicted)


def test_predictions_say_what_was_assumed() -> None:
    record = predict(20, ["reordering"])
    assert record["trace"]["counted"] == 10
    assert Hardware.__name__ not in json.dumps(record)
    assert record["assumed"]["7B"]["hardware"]["device_bytes"] == 100 * GB
    assert [row["reorder_window"] for row in record["reordering"]] == [0, 32, 0, 32]
    assert all("simulated" in str(table.title) for table in prediction_tables(record))
