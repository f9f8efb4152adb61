"""``fused-kv serve --ray``: what it hands to the application of several replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fused_kv_llm import scale
from fused_kv_llm.cli import app
from fused_kv_llm.scale.options import ServingOptions
from fused_kv_llm.server import ServerConfig


def test_flags_become_options_of_the_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[dict[str, Any], str, int]] = []
    monkeypatch.setattr(scale, "run_app", lambda *given: seen.append(given), raising=False)
    flags = ["--ray", "--replicas", "2", "--max-replicas", "5", "--port", "8123", "--model-name", "m",
             "--api-key", "sales=0123456789abcdef", "--kv-dir", str(tmp_path), "--memory-bytes", "1GB"]  # fmt: skip
    done = CliRunner().invoke(app, ["serve", *flags])
    assert done.exit_code == 0, done.output
    ((given, host, port),) = seen
    options = ServingOptions(**given)
    assert (options.replicas, options.max_replicas, host, port) == (2, 5, "127.0.0.1", 8123)
    assert options.engine["kv_dir"] == tmp_path
    server = ServerConfig(**options.server)
    assert server.model_name == "m"
    assert server.api_keys["sales"].get_secret_value() == "0123456789abcdef"


def test_replicas_need_ray() -> None:
    done = CliRunner().invoke(app, ["serve", "--replicas", "2"])
    assert done.exit_code != 0
    assert "need --ray" in done.output
