"""``fused-kv explain`` says of a text or a file whether it would be reused, and exits accordingly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from corpus import SHORT, rag_prompt
from typer.testing import CliRunner

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.cli.main import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained")
    with FusedKVEngine("smollm2-135m", kv_dir=folder / "kv", preprocessing="none") as engine:
        engine.build_kv_cache(SHORT[:1], progress=False)
    return folder


def explain(folder: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments, "--kv-dir", str(folder / "kv")])
    return result.exit_code, result.stdout if "--json" in arguments else result.output


def test_texts_and_files(folder: Path) -> None:
    code, shown = explain(folder, SHORT[0])
    assert (code, shown.splitlines()[-1].split()[0]) == (0, "reusable")
    file = folder / "chunk.txt"
    file.write_text(SHORT[1])
    code, shown = explain(folder, str(file), "--json")
    assert code == 1
    assert json.loads(shown)["outcome"] == "not_ingested"


def test_with_a_prompt(folder: Path) -> None:
    prompt = folder / "prompt.txt"
    prompt.write_text(rag_prompt([SHORT[0].replace(" ", "\n", 1)]))
    code, shown = explain(folder, SHORT[0], "--prompt", str(prompt))
    assert code == 1
    assert "respaced" in shown
    assert "--- ingested" in shown
    code, shown = explain(folder, SHORT[0], "--prompt", str(folder / "none.txt"))
    assert code != 0
    assert "cannot be read" in shown
