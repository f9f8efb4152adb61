"""The examples run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fused_kv_kernels
import fused_kv_llm
import langchain_fused_kv

ROOT = Path(__file__).parents[1]
PACKAGES = (fused_kv_llm, fused_kv_kernels, langchain_fused_kv)


def run_example(name: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    roots = {str(Path(str(package.__file__)).parents[1]) for package in PACKAGES}
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sorted(roots))},
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
