"""Machines that are not here: systems, policies, budgets and queues on assumed hardware. Nothing of it is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from .costs import roofline
from .engine import Setup, SimulatedEngine, limits
from .hardware import ASSUMED, ASSUMED_FOUR, GB, Hardware
from .report import hit_rates, times
from .shape import SEVEN_B, SEVENTY_B, ModelShape
from .trace import Trace, zipf

__all__ = ["MACHINES", "SECTIONS", "predict", "prediction_tables", "setup"]

MACHINES: dict[str, tuple[ModelShape, Hardware]] = {"7B": (SEVEN_B, ASSUMED), "70B": (SEVENTY_B, ASSUMED_FOUR)}
CHUNKS, HALF = 10_000, 0.5
SYSTEMS = ("full", "prefix", "fused")
RATES = (0.5, 1.0, 2.0)
POLICIES = ("lru", "lfu", "gdsf", "pgdsf")
EXPONENTS = (0.8, 1.2)
# Room for one chunk in twelve in memory, and for a third of them on the disk.
TIGHT = {"host_bytes": 250 * GB, "disk_bytes": 1000 * GB}
_WINDOW = 32


def setup(machine: str, how: str, **changed: Any) -> Setup:
    """Return a machine with a system on it; with prefixes, half of the device is theirs and all of the host."""
    shape, hardware = MACHINES[machine]
    hardware = replace(hardware, **{name: changed.pop(name) for name in list(changed) if hasattr(hardware, name)})
    prefixes = how == "prefix"
    most = limits(
        num_seqs=128,
        batched_rows=2048,
        layer_rows=2048,
        pool_bytes=int((HALF if prefixes else 1) * hardware.device_bytes),
        reorder_window=changed.pop("reorder_window", _WINDOW),
        prefix_bytes=int(HALF * hardware.device_bytes) if prefixes else 0,
        prefix_host_bytes=hardware.host_bytes if prefixes else 0,
    )
    policy = changed.pop("policy", "gdsf" if prefixes else "pgdsf")
    return Setup(shape, hardware, roofline(shape, hardware), most, how, policy, **changed)


def _run(trace: Trace, one: Setup) -> dict[str, Any]:
    """Simulate a trace, and return what came of its second half."""
    warm_up = len(trace.asked) // 2
    engine = SimulatedEngine(one, trace, warm_up)
    found = times(engine.open_loop(), warm_up)
    engine.close()
    return {**found, "hits": hit_rates(engine)}


def systems(requests: int) -> Iterator[dict[str, Any]]:
    """Compare full prefill, prefixes and chunk KV at ratio 0.15, at rising rates."""
    for machine in MACHINES:
        for rate in RATES:
            for how in SYSTEMS:
                found = _run(zipf(1.0, CHUNKS, requests, rate), setup(machine, how))
                yield {"machine": machine, "rate_per_s": rate, "system": how, **found}


def policies(requests: int) -> Iterator[dict[str, Any]]:
    """Compare policies where neither memory nor disk holds all, and nothing is elsewhere."""
    for exponent in EXPONENTS:
        trace = zipf(exponent, CHUNKS, requests, 1.0)
        for policy in POLICIES:
            found = _run(trace, setup("7B", "fused", policy=policy, remote=None, **TIGHT))
            yield {"system": "fused", "exponent": exponent, "policy": policy, **found}
            found = _run(trace, setup("7B", "prefix", policy=policy, host_bytes=TIGHT["host_bytes"]))
            yield {"system": "prefix", "exponent": exponent, "policy": policy, **found}


def budgets(requests: int) -> Iterator[dict[str, Any]]:
    """Vary the host's memory and the disk, with a network behind it and without."""
    trace = zipf(1.0, CHUNKS, requests, 2.0)
    for host in (0, 100, 250, 1000):
        yield {"host_gb": host, "disk_gb": 4000, "remote": True,
               **_run(trace, setup("7B", "fused", host_bytes=host * GB))}  # fmt: skip
    for disk in (500, 2000):
        for remote in (True, False):
            changed: dict[str, Any] = {} if remote else {"remote": None}
            yield {"host_gb": 1000, "disk_gb": disk, "remote": remote,
                   **_run(trace, setup("7B", "fused", disk_bytes=disk * GB, **changed))}  # fmt: skip


def reordering(requests: int) -> Iterator[dict[str, Any]]:
    """Let what is cached go first in a queue that is full, or not; of the chunks, a third fits on the disk."""
    for rate in (2.0, 4.0):
        trace = zipf(1.0, CHUNKS, requests, rate)
        for window in (0, _WINDOW):
            one = setup("7B", "fused", remote=None, reorder_window=window, **TIGHT)
            yield {"rate_per_s": rate, "reorder_window": window, **_run(trace, one)}


SECTIONS = {"systems": systems, "policies": policies, "budgets": budgets, "reordering": reordering}


def predict(requests: int, sections: list[str]) -> dict[str, Any]:
    """Return what was assumed and, by section, what came of it."""
    assumed = {
        machine: {"shape": asdict(shape), "hardware": asdict(hardware), "costs": roofline(shape, hardware).to_dict()}
        for machine, (shape, hardware) in MACHINES.items()
    }
    return {
        "assumed": assumed,
        "trace": {"chunks": CHUNKS, "requests": requests, "counted": requests - requests // 2},
        **{name: list(SECTIONS[name](requests)) for name in sections},
    }


def prediction_tables(record: dict[str, Any]) -> list[Table]:
    """Return the sections for a terminal."""
    tables = []
    for name in SECTIONS:
        rows = record.get(name, [])
        if rows:
            keys = [key for key in rows[0] if not key.endswith("_s") or key == "rate_per_s"]
            keys = [key for key in keys if key not in ("requests", "hits")]
            table = Table(*keys, "ttft mean, s", "p95, s", "answers/s", "hits", title=f"{name} (simulated)")
            for row in rows:
                hits = ", ".join(f"{tier} {share:.1%}" for tier, share in row["hits"].items())
                table.add_row(*(str(row[key]) for key in keys), f"{row['ttft_mean_s']:.3f}",
                              f"{row['ttft_p95_s']:.3f}", f"{row['requests_per_s']:.2f}", hits)  # fmt: skip
            tables.append(table)
    return tables
