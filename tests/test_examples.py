"""The examples run as they are."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from fastapi.testclient import TestClient
from nbclient import NotebookClient

import fused_kv_kernels
import fused_kv_llm
import langchain_fused_kv
import llama_index_fused_kv

ROOT = Path(__file__).parents[1]
PACKAGES = (fused_kv_llm, fused_kv_kernels, langchain_fused_kv, llama_index_fused_kv)


def python_path() -> str:
    return os.pathsep.join(sorted({str(Path(str(package.__file__)).parents[1]) for package in PACKAGES}))


class Shown(NamedTuple):
    """How an example ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Shown]:
    """Run an example in this process, which has imported the libraries already, in a folder of its own."""

    def run(name: str, *arguments: str | Path) -> Shown:
        path = str(ROOT / "examples" / name)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO("How high is it?\n\n"))
        code = None
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stopped:
            code = stopped.code
        shown = capsys.readouterr()
        # A process prints a text that it ends with, and its exit status is 1.
        return Shown(1, shown.out, shown.err + code) if isinstance(code, str) else Shown(code or 0, *shown)

    return run


def test_langchain_rag(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "langchain_rag.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "prompt tokens came from stored KV" in result.stdout
    assert len((ROOT / "examples" / "langchain_rag.py").read_text().splitlines()) < 40


def test_ask_your_files(tmp_path: Path, run_here: Callable[..., Shown]) -> None:
    passage = "The lighthouse on Ulvane Point is 38 metres high and was built of granite in 1874."
    (tmp_path / "lights.md").write_text(f"# Lights\n\n{passage}\n")
    for arguments in ([tmp_path, "How high is the lighthouse?"], [tmp_path]):
        result = run_here("ask_your_files.py", *arguments)
        assert result.returncode == 0, result.stderr
        assert "prompt tokens reused" in result.stdout
    missing = run_here("ask_your_files.py", tmp_path / "nothing", "Why?")
    assert missing.returncode == 1
    assert missing.stderr.strip().splitlines()[-1].startswith("Error: There is no file or folder")
    assert not (tmp_path / "nothing").exists()


def test_a_conversation_with_memory(run_here: Callable[..., Shown]) -> None:
    result = run_here("langchain_chat.py")
    assert result.returncode == 0, result.stderr
    assert re.search(r"\[2 messages; [1-9]\d\d+ of \d+ prompt tokens came from stored KV\]", result.stdout)


def test_a_query_engine_over_a_folder(tmp_path: Path, run_here: Callable[..., Shown]) -> None:
    passage = "The lighthouse on Ulvane Point is 38 metres high and was built of granite in 1874."
    (tmp_path / "lights.txt").write_text(passage)
    result = run_here("llama_index_folder.py", tmp_path, "How high is the lighthouse?")
    assert result.returncode == 0, result.stderr
    assert "1 chunks prefilled" in result.stdout
    assert re.search(r"\[[1-9]\d* of \d+ prompt tokens reused", result.stdout)


def test_a_streaming_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(ROOT / "examples" / "fastapi_stream.py"))
    example["llm"].max_tokens = 4
    answer = TestClient(example["app"]).get("/ask", params={"question": "Which ferry is the largest?"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert 2 <= len(events) <= 6
    assert "".join(event["text"] for event in events)
    assert events[-1]["usage"]["input_token_details"]["cache_read"] > 100
    example["llm"].close()


@pytest.mark.heavy
def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    path = ROOT / "examples" / "look_inside.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("[0.0, 0.15, 0.5, 1.0]", "[0.0, 0.15]").replace("[:6]", "[:3]")
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = [set(output.data) for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert ["text/html" in kinds for kinds in shown].count(True) == 1
    assert ["image/png" in kinds for kinds in shown].count(True) == 2
    kept = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
    assert not any(output.output_type == "error" for output in kept)
    assert kept, "the notebook is kept with its pictures"
