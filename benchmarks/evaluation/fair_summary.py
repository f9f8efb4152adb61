"""The fair table: pooled by model and ratio, then one line a cell with its number of questions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .grid import Cell
from .pooling import at_ratio, pool
from .records import read_by_settings
from .summary import markdown_table, summarise

__all__ = ["CellLog", "markdown", "summary"]

_OF_A_CELL = (
    "selector", "preprocessing", "kl", "kl_p95", "recovered", "recovered_95", "recovered_typical", "kl_p_holm",
    "top1_agreement", "gold_probability", "contains", "answer_recall", "rouge_l", "support", "ttft_median_s",
    "selection_bytes",
)  # fmt: skip
# F1 and exact match are near 0 for models of this size, whatever is done to the prompt.
_WITHOUT_SIGNAL = ("f1", "f1_95", "f1_minus_full", "f1_minus_full_95", "normalised_f1", "em", "ttft_s")


class CellLog:
    """What was asked under which settings, and what storing the chunks took: a file of JSON lines beside the records.

    Parameters
    ----------
    out : Path
        The result's path.
    """

    def __init__(self, out: Path) -> None:
        self._path = out.parent / f"{out.stem}.cells.jsonl"

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        with self._path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")

    def read(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of a kind: "settings", "ingestion" or "failure"."""
        if not self._path.exists():
            return []
        lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def note_settings(self, cell: Cell, digest: str, dtype: str) -> None:
        """Remember what a digest stands for."""
        known = {line["digest"] for line in self.read("settings")}
        if digest not in known:
            self.append({"kind": "settings", "digest": digest, "name": cell.name, "model": cell.model,
                         "dtype": dtype, "data": cell.data, **asdict(cell.setting)})  # fmt: skip


def summary(out: Path, wanted: Sequence[Cell], rules: Collection[str]) -> dict[str, Any]:
    """Return the tables of all records beside `out`, and what of the grid is missing.

    Parameters
    ----------
    out : Path
    wanted : sequence of Cell
        The whole grid.
    rules : collection of str
        Those that are compared; records of others are left alone.
    """
    log, records = CellLog(out), read_by_settings(out)
    places = {line["digest"]: line for line in log.read("settings")}
    found: list[dict[str, Any]] = []
    pooled: list[dict[str, Any]] = []
    for ratio in sorted({cell.ratio for cell in wanted}):
        tables = {digest: at_ratio(records.get(digest, {}), ratio, rules) for digest in places}
        for digest, place in places.items():
            if rows := summarise(tables[digest], _questions(tables[digest])):
                at = {key: value for key, value in place.items() if key not in ("kind", "digest")}
                slim = [{key: row[key] for key in _OF_A_CELL if key in row} for row in rows]
                found.append({**at, "ratio": ratio, "questions": rows[0]["questions"], "rows": slim})
        for table in sorted({_table_of(place) for place in places.values()}):
            mine = [tables[digest] for digest, place in places.items() if _table_of(place) == table and tables[digest]]
            records_of_all = pool(mine)
            if rows := summarise(records_of_all, _questions(records_of_all)):
                model, dtype, kind = table
                pooled.append({"model": model, "dtype": dtype, "kind": kind, "ratio": ratio, "cells": len(mine),
                               "rows": rows})  # fmt: skip
    done = {(place["name"], place["dtype"], place["ratio"]): place["questions"] for place in found}
    dtypes = sorted({place["dtype"] for place in places.values()})
    names = dict.fromkeys((cell.name, dtype, cell.ratio) for cell in wanted for dtype in dtypes)
    counts = [
        {"cell": f"{name}, {dtype}", "ratio": ratio, "questions": done.get((name, dtype, ratio), 0)}
        for name, dtype, ratio in names
    ]
    return {"pooled": pooled, "ingestion": _ingestion(log), "failures": log.read("failure"), "counts": counts,
            "cells": found}  # fmt: skip


def _table_of(place: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return which pooled table a place is part of: model, dtype, and what is asked."""
    kind = "RULER" if str(place["data"]).startswith("ruler_") else "sets"
    return str(place["model"]), str(place["dtype"]), kind


def _questions(records: Mapping[tuple[str, str], Any]) -> list[str]:
    return list(dict.fromkeys(question for question, _ in records))


def _ingestion(log: CellLog) -> list[dict[str, Any]]:
    """Return seconds and bytes a chunk by model, dtype and preprocessing: what it adds to storing the KV itself."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for line in log.read("ingestion"):
        total = sums.setdefault((line["model"], line["dtype"], line["preprocessing"]), [0.0, 0.0, 0.0])
        for place, name in enumerate(("chunks", "seconds", "bytes")):
            total[place] += line[name]
    return [
        {"model": model, "dtype": dtype, "preprocessing": name, "chunks": int(chunks),
         "seconds_per_chunk": seconds / chunks, "bytes_per_chunk": size / chunks}
        for (model, dtype, name), (chunks, seconds, size) in sums.items()
    ]  # fmt: skip


def markdown(result: Mapping[str, Any]) -> str:
    """Return the summary as markdown."""
    parts = ["# Every rule with transfer and without\n", f"`{result['environment']['command']}`\n"]
    for table in result["pooled"]:
        count = table["rows"][0]["questions"]
        rows = [{name: value for name, value in row.items() if name not in _WITHOUT_SIGNAL} for row in table["rows"]]
        head = f"{table['model']}, {table['dtype']}, {table['kind']}, ratio {table['ratio']:g}"
        parts.append(f"## {head}: {count} questions in {table['cells']} cells\n\n{markdown_table(rows)}\n")
    parts.append("## Storing chunks\n\nWhat a preprocessing adds to `none`, a chunk.\n")
    parts.append("| model | dtype | preprocessing | chunks | s | bytes |\n|---|---|---|--:|--:|--:|")
    parts += [
        f"| {line['model']} | {line['dtype']} | {line['preprocessing']} | {line['chunks']} | "
        f"{line['seconds_per_chunk']:.2f} | {line['bytes_per_chunk']:,.0f} |"
        for line in result["ingestion"]
    ]
    parts.append("\n## Questions asked\n\nOf each cell, by ratio. The JSON has every cell's table.\n")
    ratios = sorted({one["ratio"] for one in result["counts"]})
    parts.append(f"| cell | {' | '.join(f'{ratio:g}' for ratio in ratios)} |\n|---{'|--:' * len(ratios)}|")
    counts = {(one["cell"], one["ratio"]): one["questions"] for one in result["counts"]}
    for cell in dict.fromkeys(one["cell"] for one in result["counts"]):
        parts.append(f"| {cell} | {' | '.join(str(counts.get((cell, ratio), 0)) for ratio in ratios)} |")
    parts += [f"\nFailed: {line['cell']}: {line['error']}" for line in result["failures"]]
    return "\n".join(parts) + "\n"
