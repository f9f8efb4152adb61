"""What computing tokens costs: measured once, kept, told to the store and to the prefix tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.offline import prefill, prefill_cost
from fused_kv_llm.store import RecomputeCost

TEXTS = [f"Passage {number} is about the number {number}, and about nothing else at all." for number in range(6)]


def make_engine(folder: Path, **options: object) -> FusedKVEngine:
    options = {"preprocessing": "none", **options}
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)  # type: ignore[arg-type]


def stored_costs(engine: FusedKVEngine) -> list[tuple[float, int]]:
    with engine.store._parts.index._database.connection() as connection:
        query = "SELECT cost, num_tokens FROM places JOIN chunks USING (key)"
        return connection.execute(query).fetchall()


def times(folder: Path) -> list[Path]:
    return sorted(folder.glob("prefill-cost-*.json"))


def test_until_it_is_measured_the_cost_is_the_number_of_tokens(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, progress=False)
        assert all(cost == tokens for cost, tokens in stored_costs(engine))
        assert engine.corpus.cost(100, 7) == 7
    assert times(tmp_path) == []


def test_a_long_ingestion_measures_it_once_and_the_store_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "WORTH_MEASURING_TOKENS", 10)
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, progress=False)
        cost, header = engine.corpus.cost, len(engine._parts.prefix.token_ids)
        assert cost.seconds is not None
        assert cost(0, 512) == pytest.approx(512)
        for stored, tokens in stored_costs(engine):
            assert stored == pytest.approx(cost(header, tokens))
            assert stored >= 1
        assert engine.requests.prefixes._eviction._seconds is cost
    [path] = times(tmp_path)
    before = path.read_bytes()
    with make_engine(tmp_path) as engine:
        assert engine.corpus.cost.seconds is not None
        assert engine.corpus.cost.seconds.seconds == cost.seconds.seconds
        engine.build_kv_cache([*TEXTS, "One passage more, so that there is something to do."], progress=False)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: json.dumps({**json.loads(text), "version": 0}),
        lambda text: json.dumps({**json.loads(text), "machine": ["another"]}),
        lambda text: json.dumps({**json.loads(text), "seconds": [[1.0, -1.0, 2.0]] * 2}),
        lambda text: json.dumps({**json.loads(text), "cached_tokens": [5, 1]}),
        lambda text: "[]",
    ],
)
def test_damage_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage) -> None:
    monkeypatch.setattr(prefill, "WORTH_MEASURING_TOKENS", 10)
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, progress=False)
    [path] = times(tmp_path)
    path.write_text(damage(path.read_text()))
    with make_engine(tmp_path) as engine:
        assert engine.corpus.cost.seconds is None
        engine.build_kv_cache(["Something new, which is long enough to be measured beside."], progress=False)
        assert engine.corpus.cost.seconds is not None
    with make_engine(tmp_path) as engine:
        assert engine.corpus.cost.seconds is not None


def test_other_threads_are_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(tmp_path) as engine:
        here = prefill_cost._machine(engine.loaded)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
        assert prefill_cost._machine(engine.loaded) != here


def test_the_seconds_of_long_prompts_are_put_together_from_measured_pieces(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        cost = engine.corpus.cost
        assert cost.prefill_s(0, 100) is None
        # A token takes 1 ms, and 10 us for each piece of 512 tokens before its own.
        cost.seconds = RecomputeCost((0, 512), (16, 512), [[0.016, 0.512], [0.016 * 1.01, 0.512 * 1.01]])
        assert cost.prefill_s(0, 0) == 0
        assert cost.prefill_s(0, 100) == pytest.approx(0.1)
        assert cost.prefill_s(512, 100) == pytest.approx(0.101)
        assert cost.prefill_s(0, 1124) == pytest.approx(0.512 + 0.512 * 1.01 + 0.1 * 1.02)
        # What was timed too short behind cached tokens makes nothing cheaper.
        cost.seconds = RecomputeCost((0, 512), (16, 512), [[0.016, 0.512], [0.008, 0.256]])
        assert cost.prefill_s(0, 5120) == pytest.approx(5.12)


def test_it_can_be_measured_without_an_ingestion(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        engine.corpus.measure_cost()
        seconds = engine.corpus.cost.seconds
        assert seconds is not None
        assert seconds.new_tokens[-1] >= 16
        engine.corpus.measure_cost()
        assert engine.corpus.cost.seconds is seconds
