"""Loads of the real engine, simulated: one to learn from, the others beside what was measured."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

from rich.table import Table

from .costs import Costs
from .engine import Setup, SimulatedEngine, limits
from .hardware import GB, Hardware, Link
from .measured import LOADS
from .report import times
from .reuse import work_of
from .shape import SMOLLM2
from .trace import Asked, Trace, poisson

__all__ = ["LEARNT_FROM", "METRICS", "compare", "comparison_table", "learnt", "simulated"]

METRICS = ("ttft_mean_s", "latency_mean_s", "tokens_per_s")
LEARNT_FROM = "open"
"""The load that is a part of the calibration; the others are predicted."""

# The loads find every chunk in memory.
HERE = Hardware("two cores", 0, 0, 0, 4 * GB, 4 * GB, 100 * GB, Link(1), Link(1e9), None)
LIMITS = limits(num_seqs=16, batched_rows=96, layer_rows=512, pool_bytes=4 * GB)


def simulated(name: str, measured: dict[str, Any], costs: Costs) -> dict[str, float]:
    """Simulate a load, and return its times."""
    load = LOADS[name]
    moments = [0.0] * load.requests if load.rate_per_s is None else poisson(load.requests, load.rate_per_s)
    asked = [
        Asked(tuple(row["chunks"]), max(1, row["question_tokens"]), load.answer_tokens, at_s)
        for row, at_s in zip(measured["rows"], moments, strict=True)
    ]
    engine = SimulatedEngine(
        Setup(SMOLLM2, HERE, costs, LIMITS, ratio=load.ratio), Trace(asked, measured["chunk_tokens"])
    )
    if engine.tiers is not None:
        for chunk in {chunk for one in asked for chunk in one.chunks}:
            engine.tiers.read(chunk)
    found = engine.open_loop() if load.rate_per_s is not None else engine.closed_loop(load.users)
    engine.close()
    return times(found)


def summed_up(name: str, measured: dict[str, Any]) -> dict[str, float]:
    """Return the times of a measured load."""
    rows, load = measured["rows"], LOADS[name]
    wall_s = max(row["asked_s"] + row["latency_s"] for row in rows)
    return {
        "ttft_mean_s": mean(row["ttft_s"] for row in rows),
        "latency_mean_s": mean(row["latency_s"] for row in rows),
        "tokens_per_s": load.answer_tokens * len(rows) / wall_s,
        "wall_s": wall_s,
    }


def learnt(record: dict[str, Any], costs: Costs) -> Costs:
    """Return costs that know how much longer a prompt takes that is computed in turns with answers.

    Passes that were measured alone do not tell. One load's reports do: the seconds of probes and passes of requests
    beside which others were answered, over what the same passes take alone.
    """
    measured, ratio = record["measured"][LEARNT_FROM], LOADS[LEARNT_FROM].ratio
    took = alone = 0.0
    for row in measured["rows"]:
        if not _had_company(row, measured["rows"]):
            continue
        tokens = sum(measured["chunk_tokens"][chunk] for chunk in row["chunks"])
        work = work_of(ratio * tokens, row["question_tokens"], row["prompt_tokens"], tokens)
        took += row["seconds"]["probe"] + row["seconds"]["fuse"]
        alone += costs.probing_s(tokens) + costs.prompt_s(work)
    return replace(costs, beside=max(1.0, took / alone) if alone else 1.0)


def _had_company(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether another request was answered while this one waited for its first token."""
    first_s = row["asked_s"] + row["ttft_s"]
    return any(
        other is not row and other["asked_s"] + other["ttft_s"] < first_s
        and other["asked_s"] + other["latency_s"] > row["asked_s"]
        for other in rows
    )  # fmt: skip


def compare(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return measured and simulated times of every load, and by how much the simulation is off."""
    costs, rows = Costs(**record["costs"]), list[dict[str, Any]]()
    for name, measured in record["measured"].items():
        real, ours = summed_up(name, measured), simulated(name, measured, costs)
        apart = simulated(name, measured, replace(costs, beside=1.0))
        rows += [
            {"load": name, "is_predicted": name != LEARNT_FROM, "metric": metric, "measured": real[metric],
             "simulated": ours[metric], "error": ours[metric] / real[metric] - 1,
             "error_without_beside": apart[metric] / real[metric] - 1}
            for metric in METRICS
        ]  # fmt: skip
    return rows


def comparison_table(rows: list[dict[str, Any]]) -> Table:
    """Return it for a terminal."""
    table = Table("load", "", "measured", "simulated", "error")
    for row in rows:
        role = "predicted" if row["is_predicted"] else "learnt from"
        table.add_row(f"{row['load']}, {role}", row["metric"], f"{row['measured']:.3f}", f"{row['simulated']:.3f}",
                      f"{row['error']:+.1%}")  # fmt: skip
    return table
