"""The examples run as they are."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

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


def run_example(name: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": python_path()},
        input="How high is it?\n\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_langchain_rag(tmp_path: Path) -> None:
    result = run_example("langchain_rag.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "prompt tokens came from stored KV" in result.stdout
    assert len((ROOT / "examples" / "langchain_rag.py").read_text().splitlines()) < 40


def test_ask_your_files(tmp_path: Path) -> None:
    passage = "The lighthouse on Ulvane Point is 38 metres high and was built of granite in 1874."
    (tmp_path / "lights.md").write_text(f"# Lights\n\n{passage}\n")
    for arguments in ([tmp_path, "How high is the lighthouse?"], [tmp_path]):
        result = run_example("ask_your_files.py", *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert "prompt tokens reused" in result.stdout
    missing = run_example("ask_your_files.py", tmp_path / "nothing", "Why?", cwd=tmp_path)
    assert missing.returncode == 1
    assert missing.stderr.strip().splitlines()[-1].startswith("Error: There is no file or folder")
    assert not (tmp_path / "nothing").exists()


def test_a_conversation_with_memory(tmp_path: Path) -> None:
    result = run_example("langchain_chat.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\[2 messages; [1-9]\d\d+ of \d+ prompt tokens came from stored KV\]", result.stdout)


def test_a_query_engine_over_a_folder(tmp_path: Path) -> None:
    passage = "The lighthouse on Ulvane Point is 38 metres high and was built of granite in 1874."
    (tmp_path / "lights.txt").write_text(passage)
    result = run_example("llama_index_folder.py", tmp_path, "How high is the lighthouse?", cwd=tmp_path)
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
