"""The fair table: its grid, how settings are pooled, and what a run leaves behind."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path

import pytest
from evaluation.fair_summary import CellLog, markdown, summary
from evaluation.grid import MODELS, ROUNDS, SETS, Cell, cells
from evaluation.methods import BASELINE, FULL, Method
from evaluation.pooling import at_ratio, pool
from evaluation.records import RecordFile, Records
from evaluation.setting import Setting
from fair import chosen_cells

RULE, DEFAULT = Method("random", "none", 0.15), Method("sink_attention", "none", 0.15)


def _records(kl: dict[str, float]) -> Records:
    return {
        (question, method.key): {"kl": value * scale, "ttft_s": 1.0, "probe_s": 0.1, "question": question}
        for question, value in kl.items()
        for method, scale in ((FULL, 0.0), (BASELINE, 4.0), (RULE, 2.0), (DEFAULT, 1.0))
    }


def test_the_grid_begins_with_little_of_everything() -> None:
    grid = list(cells("held"))
    asked = [(cell.model, cell.data, cell.setting.frame, cell.setting.passages, cell.setting.chunk_tokens)
             for cell in grid[:40] if not cell.data.startswith("ruler")]  # fmt: skip
    # Two models, two wordings, two lengths; squad10 has two chunk sizes.
    assert len(set(asked)) == 2 * 2 * 2 * (len(SETS) + 1)
    assert {cell.model for cell in grid if cell.data.startswith("ruler")} == set(MODELS)
    counts: dict[tuple[str, float], int] = {}
    for cell in grid:
        assert cell.questions > counts.get((cell.name, cell.ratio), 0)
        counts[cell.name, cell.ratio] = cell.questions
    switches = [model for model, _ in groupby(cell.model for cell in grid)]
    assert len(switches) <= 2 * len(ROUNDS)
    assert all(cell.setting.order == "shuffled" for cell in grid if not cell.data.startswith("ruler"))


def test_only_cells_that_are_named_are_asked() -> None:
    grid = list(cells("held"))
    args = argparse.Namespace(
        models=["smollm2-135m"], ratios=[0.15], only=["ruler_multi_query", "short, 10"], cells=None
    )
    names = {cell.name for cell in chosen_cells(args, grid)}
    assert len(names) == 3 + len(SETS) + 1
    assert all("ruler_multi_query" in name or "short, 10" in name for name in names)
    assert len(chosen_cells(argparse.Namespace(**{**vars(args), "cells": 2}), grid)) == 2
    args.only = ["ruller"]
    with pytest.raises(
        SystemExit, match="ruller: no cell has such a name; one is called 'smollm2-135m, squad10, plain"
    ):
        chosen_cells(args, grid)


def test_a_ratio_takes_questions_that_all_its_methods_have_answered() -> None:
    records = _records({"a": 1.0, "b": 2.0})
    records["a", "random/none/0.5"] = {"kl": 9.0}
    del records["b", RULE.key]
    # A rule that is no longer asked keeps no question out.
    records["a", "prefix_cache/none/0.15"] = {"kl": 0.0}
    rules = ("random", "sink_attention")
    assert at_ratio(records, 0.15, rules) == _records({"a": 1.0})
    assert at_ratio(records, 0.3, rules) == {}


def test_pooling_takes_a_question_once_with_its_mean_over_settings() -> None:
    first, second = _records({"a": 1.0, "b": 2.0}), _records({"a": 3.0})
    pooled = pool([first, second, {}])
    assert pooled["a", RULE.key]["kl"] == pytest.approx(4.0)
    assert pooled["b", RULE.key]["kl"] == pytest.approx(4.0)
    assert "question" not in pooled["a", RULE.key]
    without = {pair: record for pair, record in second.items() if pair[1] != RULE.key}
    assert {key for _, key in pool([first, without])} == {FULL.key, BASELINE.key, DEFAULT.key}


def test_the_summary_says_how_many_questions_each_cell_has(tmp_path: Path) -> None:
    out = tmp_path / "fair.json"
    asked, other = (Cell("m", data, Setting(), 0.15, 20) for data in ("squad10", "hotpotqa"))
    log = CellLog(out)
    log.note_settings(asked, "d", "float32")
    log.note_settings(asked, "d", "float32")
    line = {"kind": "ingestion", "model": "m", "dtype": "float32", "preprocessing": "similar"}
    log.append({**line, "chunks": 4, "seconds": 2.0, "bytes": 40})
    log.append({**line, "chunks": 1, "seconds": 3.0, "bytes": 10})
    log.append({**line, "dtype": "bfloat16", "chunks": 1, "seconds": 9.0, "bytes": 5})
    log.append({"kind": "failure", "cell": "x", "ratio": 0.15, "error": "no room"})
    file = RecordFile(out, "d", (0, 1))
    for question in (f"q{i}" for i in range(12)):
        records = _records({question: 1.0 + int(question[1:])})
        file.append(question, {key: {"kl": r["kl"], "ttft_s": 1.0, "probe_s": 0.1} for (_, key), r in records.items()})
    assert len(log.read("settings")) == 1
    result = {
        **summary(out, [asked, other], ["random", "sink_attention"]),
        "environment": {"command": "python benchmarks/fair.py"},
    }
    assert [one["questions"] for one in result["counts"]] == [12, 0]
    assert result["ingestion"][0]["seconds_per_chunk"] == pytest.approx(1.0)
    rows = {row["selector"]: row for row in result["pooled"][0]["rows"]}
    assert rows["sink_attention"]["recovered"] == pytest.approx(0.75)
    assert rows["random"]["kl_p_holm"] < 0.001
    text = markdown(result)
    assert "12 questions in 1 cells" in text
    assert "| m, hotpotqa, plain, 5 chunks, float32 | 0 |" in text
    assert "Failed: x: no room" in text


def test_a_table_has_one_dtype(tmp_path: Path) -> None:
    out, cell = tmp_path / "fair.json", Cell("m", "squad10", Setting(), 0.15, 20)
    for dtype, questions in (("float32", 3), ("bfloat16", 2)):
        CellLog(out).note_settings(cell, dtype, dtype)
        file = RecordFile(out, dtype, (0, 1))
        for question in (f"q{i}" for i in range(questions)):
            records = _records({question: 1.0})
            timed = {key: {"kl": r["kl"], "ttft_s": 1.0, "probe_s": 0.1} for (_, key), r in records.items()}
            file.append(question, timed)
    result = summary(out, [cell], ["random", "sink_attention"])
    tables = {table["dtype"]: table["rows"][0]["questions"] for table in result["pooled"]}
    assert tables == {"bfloat16": 2, "float32": 3}
    assert {one["cell"].split(", ")[-1]: one["questions"] for one in result["counts"]} == tables
