"""The quality benchmark's result: a table of each set and of all, and a picture that can be read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quality
from evaluation.methods import FULL, methods_of


def _records(of_set: str, selectors: list[str], reused: float) -> dict[tuple[str, str], dict[str, Any]]:
    """Return records of two questions: with a KL of `reused` in full reuse, and half of that with every rule."""
    methods = [FULL, *methods_of(selectors, ["none"], [0.15])]
    kl = {"full_prefill": 0.0, "full_reuse": reused}
    return {
        (f"{of_set} {number}", method.key): {"kl": kl.get(method.selector, reused / 2), "ttft_s": 1.0, "probe_s": 0.0}
        for number in range(2)
        for method in methods
    }


def _written(path: Path, selectors: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    out = path / "quality.json"
    monkeypatch.setattr("sys.argv", ["quality.py", "--data", "one.jsonl", "two.jsonl", "--out", str(out)])
    records = {"one": _records("one", selectors, 1.0), "two": _records("two", selectors, 3.0)}
    engine: Any = SimpleNamespace(dtype="float32", device="cpu")
    quality.write_results(records, engine, quality.parse())
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def test_all_sets_have_a_table_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _written(tmp_path, ["random"], monkeypatch)
    (pooled,) = found["pooled"]
    rows = {row["selector"]: row for row in pooled["rows"]}
    assert {row["questions"] for row in rows.values()} == {4}
    assert (rows["full_reuse"]["kl"], rows["random"]["recovered"]) == (2.0, 0.5)
    assert [result["data"] for result in found["results"]] == ["one", "two"]
    text = (tmp_path / "quality.md").read_text(encoding="utf-8")
    assert "## all sets, 4 questions" in text
    assert (tmp_path / "quality.png").exists()


def test_more_lines_than_can_be_told_apart_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _written(tmp_path, [f"rule {number}" for number in range(40)], monkeypatch)
    assert (tmp_path / "quality.md").exists()
    assert not (tmp_path / "quality.png").exists()


def test_two_sets_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["quality.py", "--data", "a/one.jsonl", "b/one.jsonl"])
    with pytest.raises(SystemExit):
        quality.parse()
    assert "a set goes by its file's name" in capsys.readouterr().err
