"""``fused-kv ingest --ray`` and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fused_kv_llm.cli import app
from fused_kv_llm.demo import handbook_folder
from fused_kv_llm.store import KVStore


def test_it_needs_a_shared_store_and_its_options_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSED_KV_REMOTE", raising=False)
    for flags, told in ((["--ray"], "--remote"), (["--prune"], "give --ray too"), (["--actors", "2"], "--ray too")):
        result = CliRunner().invoke(app, ["ingest", str(tmp_path), "--kv-dir", str(tmp_path / "kv"), *flags])
        assert result.exit_code == 1
        assert told in result.output
    assert not (tmp_path / "kv").exists()


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
def test_files_are_ingested_on_ray_and_can_be_asked_about(ray: Any, model_folder: Path, tmp_path: Path) -> None:
    file = next(handbook_folder().glob("*.txt"))
    shared, model = f"file://{tmp_path}/shared", ["--model", str(model_folder), "--kv-dir", str(tmp_path / "kv")]
    told = ["--remote", shared, "--preprocessing", "none"]
    result = CliRunner().invoke(app, ["ingest", str(file), "--ray", "--actors", "1", *model, *told])
    assert result.exit_code == 0, result.output
    assert "chunks prefilled" in result.output
    assert "1 actors" in result.output
    with KVStore(tmp_path / "elsewhere", remote=shared) as store:
        assert store.stats().tiers["remote"][0] > 3
    asked = CliRunner().invoke(
        app, ["ask", "How many?", "--kv-dir", str(tmp_path / "kv"), "--remote", shared, "--max-tokens", "2"]
    )
    assert asked.exit_code == 0, asked.output
    assert re.search(r"[1-9]\d* chunks found", asked.output)
