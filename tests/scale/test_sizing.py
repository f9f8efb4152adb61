"""The calculator: its arithmetic, its bounds, and the simulator beside it."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.engine import SimulatedEngine
from simulation.hardware import GB, Hardware
from simulation.predict import setup
from simulation.replicas import SimulatedReplicas
from simulation.shape import ModelShape
from simulation.trace import zipf
from typer.testing import CliRunner

from fused_kv_llm.cli import app
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.scale.sizing import size
from fused_kv_llm.scale.sizing_inputs import Machine, ModelGeometry, Workload
from fused_kv_llm.scale.zipf import lru_hit_share

EIGHT_B = {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "hidden_size": 4096,
           "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip
MODEL = ModelGeometry.of_config(EIGHT_B)
MACHINE = Machine(250e12, 2e12, 40e9, 100e9, 1e12, 40e9, 5e9, 1e9)
WORK = Workload(chunks=100_000, chunk_tokens=250, requests_per_s=20, chunks_per_request=5)
# What the calculator may be off by from the simulator; docs/scale.md says so.
THROUGHPUT, RESIDENCE = 0.25, 0.1


def test_bytes_are_those_of_the_geometry() -> None:
    assert MODEL.params == pytest.approx(7.5e9, rel=0.05)
    assert MODEL.stored_bytes == MODEL.device_bytes == 2 * 32 * 8 * 128 * 2
    found = size(WORK, MODEL, MACHINE)
    assert found.chunk_bytes == 250 * MODEL.stored_bytes
    assert found.store_bytes == 100_000 * found.chunk_bytes
    assert found.loaded_bytes_per_request == 5 * found.chunk_bytes
    assert found.memory_share + found.disk_share + found.remote_share == pytest.approx(1)


def test_quantised_kv_takes_half() -> None:
    small = size(WORK, ModelGeometry.of_config(EIGHT_B, kv_dtype="int8"), MACHINE)
    assert small.store_bytes == pytest.approx(0.5 * size(WORK, MODEL, MACHINE).store_bytes, rel=0.02)


@given(st.floats(0.5, 500), st.floats(1.1, 4))
def test_more_requests_never_need_fewer_replicas(rate: float, more: float) -> None:
    few = size(replace(WORK, requests_per_s=rate), MODEL, MACHINE)
    many = size(replace(WORK, requests_per_s=rate * more), MODEL, MACHINE)
    assert many.replicas >= few.replicas
    assert rate <= few.replicas * few.requests_per_s_each * WORK.utilisation * (1 + 1e-9)


def test_what_is_slow_is_named() -> None:
    large = replace(WORK, chunks=10_000_000)
    assert size(large, MODEL, MACHINE).limit == "remote"
    # The replicas that are needed hold all of a smaller corpus on their disks.
    assert size(WORK, MODEL, replace(MACHINE, remote_bytes_per_s=1e7)).remote_share == 0
    assert size(large, MODEL, replace(MACHINE, disk_bytes_per_s=1e8)).limit == "disk"
    slow = size(WORK, MODEL, replace(MACHINE, load_bytes_per_s=1e8))
    assert (slow.limit, slow.service_s > 1) == ("compute", True)
    roomy = replace(MACHINE, disk_bytes=1e14, disk_bytes_per_s=1e11)
    assert size(WORK, MODEL, roomy).limit == "compute"
    assert size(WORK, MODEL, roomy).remote_bytes_per_s == 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit into device_kv_bytes"):
        size(WORK, MODEL, replace(MACHINE, device_kv_bytes=1e6))
    with pytest.raises(ConfigError, match="More than 100000 replicas"):
        size(replace(WORK, zipf_exponent=0, requests_per_s=1e9), MODEL, MACHINE)
    with pytest.raises(ConfigError, match="chunks=0"):
        replace(WORK, chunks=0)
    with pytest.raises(ConfigError, match="recompute_ratio=2"):
        replace(WORK, recompute_ratio=2)
    with pytest.raises(ConfigError, match="fp7"):
        ModelGeometry.of_config(EIGHT_B, kv_dtype="fp7")
    with pytest.raises(ConfigError, match="'hidden_size'"):
        ModelGeometry.of_config({"num_attention_heads": 1, "num_hidden_layers": 1})


@pytest.mark.parametrize(("items", "exponent", "held"), [(500, 0.8, 50), (2000, 1.0, 400), (300, 0.0, 90)])
def test_the_hit_share_is_that_of_a_cache_of_the_last_used(items: int, exponent: float, held: int) -> None:
    weights = np.arange(1, items + 1) ** -exponent
    drawn = np.random.default_rng(0).choice(items, 40_000, p=weights / weights.sum()).tolist()
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, item in enumerate(drawn):
        hits += item in cache and number >= 10_000
        cache[item] = None
        cache.move_to_end(item)
        if len(cache) > held:
            cache.popitem(last=False)
    assert lru_hit_share(items, exponent, held) == pytest.approx(hits / 30_000, abs=0.015)


def test_hit_shares_at_the_ends_and_of_many_items() -> None:
    assert lru_hit_share(10, 1.0, 10) == 1.0
    assert lru_hit_share(10, 1.0, 0) == 0.0
    assert lru_hit_share(10**7, 0.0, 10**6) == pytest.approx(0.1, abs=0.005)
    with pytest.raises(ConfigError, match="items=0"):
        lru_hit_share(0, 1.0, 1)


def machine_of(hardware: Hardware) -> Machine:
    remote = hardware.remote or hardware.disk
    return Machine(hardware.flops_per_s, hardware.memory_bytes_per_s, hardware.device_bytes, hardware.host_bytes,
                   hardware.disk_bytes, hardware.host.bytes_per_s, hardware.disk.bytes_per_s, remote.bytes_per_s,
                   hardware.step_s)  # fmt: skip


def geometry_of(shape: ModelShape) -> ModelGeometry:
    return ModelGeometry(shape.params, shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim)


@pytest.mark.heavy
@pytest.mark.parametrize("machine", ["7B", "70B"])
@pytest.mark.parametrize(("k", "answer"), [(4, 32), (10, 128)])
def test_the_simulator_answers_as_many_requests(machine: str, k: int, answer: int) -> None:
    """A replica that is never idle, request by request, with the library's scheduler, memory tier and ledger."""
    one, requests = setup(machine, "fused"), 300
    trace = zipf(0.8, 500, requests, 1000.0, k=k, answer_tokens=answer)
    engine = SimulatedEngine(one, trace)
    ended = sorted(request.token_s[-1] for request in engine.open_loop())
    engine.close()
    simulated = (requests // 2) / (ended[3 * requests // 4] - ended[requests // 4])
    work = Workload(500, float(np.mean(trace.chunk_tokens)), 0.001, k, 64, answer)
    found = size(work, geometry_of(one.shape), machine_of(one.hardware))
    assert found.requests_per_s_each == pytest.approx(simulated, rel=THROUGHPUT)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("k", "exponent", "memory_gb", "disk_gb", "replicas"),
    [(4, 0.8, 50, 2000, 1), (4, 0.6, 20, 100, 1), (4, 0.8, 30, 2000, 2)],
)
def test_the_simulator_finds_as_much_in_memory(
    k: int, exponent: float, memory_gb: int, disk_gb: int, replicas: int
) -> None:
    """Replicas behind the router's own placement; hits are counted once their memory is full."""
    one = setup("7B", "fused", host_bytes=memory_gb * GB, disk_bytes=disk_gb * GB)
    trace = zipf(exponent, 1000, 600, 3.0 * replicas, k=k, answer_tokens=16)
    simulated = SimulatedReplicas(one, trace, replicas, warm_up=300)
    simulated.open_loop()
    resident = simulated.tiers()["memory"]
    simulated.close()
    held = replicas * memory_gb * GB / (float(np.mean(trace.chunk_tokens)) * one.shape.kv_bytes_per_token)
    assert lru_hit_share(1000, exponent, held) == pytest.approx(resident, abs=RESIDENCE)


def command(tmp_path: Path, config: Any = EIGHT_B, *more: str) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ["size", "--config", str(tmp_path / "config.json"), "--chunks", "1000", "--requests-per-s", "5", *more]


def test_the_command_says_what_the_calculator_does(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, command(tmp_path, EIGHT_B, "--json"))
    machine = replace(MACHINE, device_kv_bytes=40e9)
    want = size(Workload(1000, 250, 5, 5), MODEL, machine).to_dict()
    assert json.loads(done.output) == pytest.approx(want)
    table = CliRunner().invoke(app, command(tmp_path, {"text_config": EIGHT_B})).output
    assert "KV of the corpus" in table
    assert "32.8 GB" in table


def test_a_configuration_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*command(tmp_path)[:2], str(tmp_path / "none.json"), *command(tmp_path)[3:]])
    assert done.exit_code != 0
    assert "none.json cannot be read" in done.output
