"""Reading the records in benchmarks/results, and the pages that tell of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from evaluation.questions import is_held_back
from evaluation.summary import summarise

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def prose(page: str) -> str:
    """Return the text of a page in one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def table(page: str, first_column: str) -> list[list[str]]:
    """Return the cells of the only table of a page whose head begins with that cell, without head and rule."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith(f"| {first_column} |")]
    assert len(heads) == 1, f"{page} has {len(heads)} tables that begin with {first_column!r}"
    rows = []
    for line in lines[heads[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def times(value: float) -> str:
    """Return a ratio with two significant digits or more."""
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def quality(name: str) -> dict[str, dict[tuple[str, str, float], dict[str, Any]]]:
    """Return a record's rows by data set and by selector, preprocessing and ratio."""
    # The record is of version 0.1.0, in which this rule had the name of the method that it stands in for.
    now = {"cache_craft": "cache_craft_online"}
    return {
        result["data"]: {
            (now.get(row["selector"], row["selector"]), row["preprocessing"], row["ratio"]): row
            for row in result["rows"]
        }
        for result in record(name)["results"]
    }


def with_interval(row: dict[str, Any]) -> str:
    """Return what a method recovers, with its 95 % interval."""
    low, high = row["recovered_95"]
    return f"{100 * row['recovered']:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def behind(rows: Mapping[tuple[str, str], dict[str, Any]], preprocessing: str) -> list[str]:
    """Return the rules that are worse than the default beyond chance, after a preprocessing."""
    default = rows["sink_attention", preprocessing]["kl"]
    return [
        rule
        for (rule, made), row in rows.items()
        if made == preprocessing and row["kl"] > default and row.get("kl_p_holm", 1.0) < 0.05
    ]


def records_of(name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the records of a run, by set in the order of its results."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (RESULTS / name).read_text(encoding="utf-8").splitlines():
        found.setdefault(json.loads(line)["settings"], []).append(json.loads(line))
    return found


def rows_of(records: list[dict[str, Any]]) -> dict[tuple[str, str, float], dict[str, Any]]:
    """Return the row of each method."""
    kept = {(one["question"], one["method"]): one for one in records}
    rows = summarise(kept, list(dict.fromkeys(question for question, _ in kept)))
    return {(row["selector"], row["preprocessing"], row["ratio"]): row for row in rows}


def held_back(records: list[dict[str, Any]]) -> dict[tuple[str, str, float], dict[str, Any]]:
    """Return the rows of the questions that are held back."""
    return rows_of([one for one in records if is_held_back(one["question"])])


def total(records: list[dict[str, Any]], method: str, questions: int = 40) -> float:
    found = [record["kl"] for record in records if record["method"] == method]
    assert len(found) == questions
    return float(sum(found))


def kl_rows(*kinds: str, questions: int = 120) -> Iterator[list[str]]:
    """Yield, by wording and ratio, the KL of the first kind of records over that of the second, on its questions."""
    for frame in ("plain", "short"):
        one, other = (f"quality_ten_{frame}{kind}_cpu" for kind in kinds)
        yield from kl_over(one, other, frame, questions)


def kl_over(name: str, other_name: str, frame: str, questions: int) -> Iterator[list[str]]:
    """Yield, by ratio, the KL of a wording's records over that of others, on the questions of the others."""
    one, other = (
        {
            (at, row["question"], row["method"]): row["kl"]
            for at, rows in enumerate(records_of(f"{found}.records.jsonl").values())
            for row in rows
        }
        for found in (name, other_name)
    )
    for ratio, method in (("0", "full_reuse/similar/0"), ("0.15", "sink_attention/similar/0.15")):
        keys = [key for key in other if key in one and key[2] == method]
        assert len(keys) == questions
        # A hundredth of a percent of the usual KL: what is exact already has no ratio.
        logs = [log((one[key] + 1e-4) / (other[key] + 1e-4)) for key in keys]
        yield [f"`{frame}`, {ratio}", *ratio_cells(logs)]


def ratio_cells(logs: Sequence[float]) -> list[str]:
    """Return the geometric mean of ratios, its 95 % interval and how many are below 1, given their logarithms."""
    half = 1.96 * stdev(logs) / sqrt(len(logs))
    low, middle, high = (f"{exp(mean(logs) + side * half):.2f}" for side in (-1, 0, 1))
    return [middle, f"{low} to {high}", f"{100 * (sum(one < 0 for one in logs) / len(logs)):.0f} %"]


def second_passes(name: str, prompts: int) -> list[float]:
    """Return how many times as long as the first both passes took, run by run, the fastest first."""
    runs = record(f"second_pass_{name}_cpu.json")["runs"]
    return sorted(run["total_over_first"] for run in runs if run["prompts"] == prompts)


def told_nearer(rows: list[dict[str, Any]]) -> str:
    """How much lower the p95 along the answer is than that of a fixed ratio of the same mean, target by target."""
    found = {row["way"]: row for row in rows if row["along"] == "answer"}
    compared = [row for way, row in found.items() if re.fullmatch(r"adaptive [\d.]+", way)]
    *most, last = (f"{100 * (1 - row['p95'] / row['fixed_p95']):.0f}" for row in compared)
    return f"{', '.join(most)} and {last} %"


def ways_of_recomputing(name: str) -> list[list[str]]:
    """Return the table of a record of adaptive and fixed ratios."""
    rows = {(row["way"], row["along"]): row for row in record(name)["rows"]}
    want = []
    for way in dict.fromkeys(way for way, _ in rows):
        answer, gold = rows[way, "answer"], rows[way, "gold"]
        cells = [way, f"{100 * answer['mean_share']:.1f} %", f"{answer['mean']:.3f}"]
        for row in (answer, gold):
            adaptive = "fixed_p95" in row
            cells += [f"{row['p95']:.3f}", f"{row['fixed_p95']:.3f}" if adaptive else "-"]
            cells.append(f"{row['rank_correlation']:.2f}" if adaptive else "-")
        want.append(cells)
    return want
