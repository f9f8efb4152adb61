"""Figures in docs/simulation.md are those of the records."""

from __future__ import annotations

from typing import Any

import pytest

from .records import record, table

PAGE = "docs/simulation.md"


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def found_in(row: dict[str, Any]) -> str:
    tiers = ("memory", "disk", "remote", "missed")
    return ", ".join(f"{tier} {100 * row['hits'][tier]:.0f}%" for tier in tiers if tier in row["hits"])


@pytest.mark.parametrize(("column", "earlier"), [("load, metric", False), ("earlier load, metric", True)])
def test_a_simulated_run_beside_the_measured_one(column: str, earlier: bool) -> None:
    found = record("simulation_cpu.json")
    rows = found["earlier_run"]["compared"] if earlier else found["compared"]
    names = {"ttft_mean_s": "mean TTFT, s", "latency_mean_s": "mean latency, s", "tokens_per_s": "tokens/s"}
    assert table(PAGE, column) == [
        [f"{row['load']}, {names[row['metric']]}", f"{row['measured']:.2f}", f"{row['simulated']:.2f}",
         f"{100 * row['error']:+.1f}%", f"{100 * row['error_without_beside']:+.1f}%"]
        for row in rows
    ]  # fmt: skip
    predicted = [row for row in rows if row["load"] != "open"]
    assert max(abs(row["error"]) for row in predicted) < (0.15 if earlier else 0.03)


def test_what_a_simulation_assumes() -> None:
    machines = list(record("simulation_assumed.json")["assumed"].values())
    for name, row in ((row[0], row[1:]) for row in table(PAGE, "assumed")):
        for told, machine in zip(row, machines, strict=True):
            shape, hardware = machine["shape"], machine["hardware"]
            kv = 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"] * shape["value_bytes"]
            gb = {key: f"{value / 1e9:,.0f} GB" for key, value in hardware.items() if isinstance(value, (int, float))}
            gb |= {key: f"{hardware[key]['bytes_per_s'] / 1e9:,.0f} GB" for key in ("host", "disk", "remote")}
            layout = (shape[key] for key in ("num_layers", "num_heads", "num_kv_heads", "head_dim"))
            assert (
                told
                == {
                    "weights": f"{shape['params'] / 1e9:.1f} billion",
                    "layers, heads, KV heads, head size": ", ".join(map(str, layout)),
                    "KV of a token": f"{kv / 1e3:.0f} kB",
                    "operations a second, reached": f"{hardware['flops_per_s'] / 1e12:,.0f} T",
                    "device memory: for KV; bytes a second": f"{gb['device_bytes']}; {gb['memory_bytes_per_s']}",
                    "host memory: for chunks; to the device a second": f"{gb['host_bytes']}; {gb['host']}",
                    "disk: for chunks; bytes a second": f"{gb['disk_bytes']}; {gb['disk']}",
                    "network: bytes a second": gb["remote"],
                    "a pass takes besides": f"{1e3 * hardware['step_s']:.0f} ms",
                }[name]
            )


def test_simulated_machines() -> None:
    found, page = record("simulation_assumed.json"), PAGE
    systems: dict[str, list[str]] = {}
    for row in found["systems"]:
        told = f"{seconds(row['ttft_mean_s'])} s, {row['requests_per_s']:.2f}"
        systems.setdefault(f"{row['machine']}, {row['rate_per_s']:g}", []).append(told)
    assert {row[0]: row[1:] for row in table(page, "shape, requests/s")} == systems
    policies: dict[str, list[str]] = {}
    for row in found["policies"]:
        share = found_in(row) if row["system"] == "fused" else f"{100 * row['hits']['prefix']:.1f}%"
        told_row = policies.setdefault(f"{row['exponent']}, `{row['policy']}`", [])
        told_row += [share, f"{row['ttft_mean_s']:.3f} s"]
    assert {row[0]: row[1:] for row in table(page, "Zipf, policy")} == policies
    assert table(page, "memory, disk, network") == [
        [f"{row['host_gb']:,} GB, {row['disk_gb']:,} GB, {'yes' if row['remote'] else 'no'}", found_in(row),
         f"{row['ttft_mean_s']:.3f} s", f"{row['ttft_p95_s']:.3f} s"]
        for row in found["budgets"]
    ]  # fmt: skip
    assert table(page, "requests/s, window") == [
        [f"{row['rate_per_s']:g}, {row['reorder_window']}",
         *(f"{seconds(row[f'ttft_{share}_s'])} s" for share in ("mean", "p50", "p95")), f"{row['requests_per_s']:.2f}"]
        for row in found["reordering"]
    ]  # fmt: skip
