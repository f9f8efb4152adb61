"""Faithfulness by a judge: what is counted, and what is said where the judge's environment is missing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from evaluation.methods import FULL, Method
from faithfulness import judge, rows_of

METHOD = Method("sink_attention", "similar", 0.15)


def test_answers_that_the_judge_did_not_understand_are_counted_apart() -> None:
    said = [(METHOD, 1.0, 0.5), (METHOD, None, 1.0), (METHOD, 0.5, 0.0), (FULL, None, 0.25)]
    lines = [{"method": method.key, "faithfulness": value, "support": support} for method, value, support in said]
    assert rows_of(lines, [FULL, METHOD]) == [
        {"method": FULL.key, "answers": 1, "judged": 0, "faithfulness": None, "support": 0.25},
        {"method": METHOD.key, "answers": 3, "judged": 2, "faithfulness": 0.75, "support": 0.5},
    ]


def test_the_judge_runs_by_another_python_and_its_words_stand_by_the_answers(tmp_path: Path) -> None:
    # In place of Ragas' environment: a program that gets the answers, the address and the model.
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "assert 'PYTHONPATH' not in os.environ\n"
        "for line in open(sys.argv[2]):\n"
        "    said = [json.loads(line)['answer'], *sys.argv[3:7], *sys.argv[9:]]\n"
        "    print(json.dumps({'faithfulness': 1.0, 'error': ' '.join(said)}))\n"
    )
    python.chmod(0o755)
    args = argparse.Namespace(
        judge_python=python,
        judge_url="http://judge",
        judge_model="m",
        judge_mode="json",
        judge_temperature=0.5,
        out=tmp_path / "f.json",
    )
    lines = [{"answer": "one", "contexts": ("a",)}, {"answer": "two", "contexts": ("b",)}]
    judge(lines, args)
    assert [line["error"] for line in lines] == [
        f"{word} --url http://judge --model m --temperature 0.5" for word in ("one", "two")
    ]
    kept = [json.loads(line) for line in (tmp_path / "f.answers.jsonl").read_text().splitlines()]
    assert kept == [{"answer": "one", "contexts": ["a"]}, {"answer": "two", "contexts": ["b"]}]
    args.judge_python = tmp_path / "missing"
    with pytest.raises(SystemExit, match="make build/ragas"):
        judge(lines, args)
