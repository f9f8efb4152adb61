"""Options of ``fused-kv serve`` from a file, from variables and from flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fused_kv_llm.cli import app

FILE = """
model = "smollm2-135m"
port = 9000
remote = "redis://:the-secret-of-redis@cache.example/0"
recompute_ratio = 0.5
max_num_seqs = 3
allowed_host = ["rag.example"]
body_timeout_s = 7.5

[api_keys]
sales = "the-secret-key-of-the-sales"

[quotas.sales]
requests_per_minute = 60
"""


def shown(folder: Path, text: str, *flags: str, **variables: str) -> dict[str, tuple[str, str]]:
    """Return the options that a server would have, with where each comes from."""
    (folder / "serve.toml").write_text(text, encoding="utf-8")
    command = ["serve", "--config", str(folder / "serve.toml"), "--show-config", *flags]
    done = CliRunner(env={"COLUMNS": "400", **variables}).invoke(app, command)
    assert done.exit_code == 0, done.output
    found = re.findall(r"^(\w+) = (.*?)  # (.*)$", done.output, re.MULTILINE)
    assert "the-secret" not in done.output
    return {name: (value, source) for name, value, source in found}


def test_flags_outrank_variables_and_those_outrank_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "serve.toml")
    got = shown(tmp_path, FILE, "--port", "9002", FUSED_KV_PORT="9001", FUSED_KV_MAX_NUM_SEQS="5")
    assert got["port"] == ("9002", "flag")
    assert got["max_num_seqs"] == ("5", "variable")
    assert got["recompute_ratio"] == ("0.5", path)
    assert got["allowed_host"] == ("['rag.example']", path)
    assert got["body_timeout_s"] == ("7.5", path)
    assert got["api_keys"] == ("***", path)
    assert got["remote"] == ("***", path)
    assert got["host"] == ("127.0.0.1", "default")
    assert shown(tmp_path, FILE)["port"] == ("9000", path)


def test_what_the_file_says_is_checked_as_flags_are(tmp_path: Path) -> None:
    for text, told in (
        ("prot = 9000", "did you mean 'port'?"),
        ("port = 'many'", "port"),
        ("body_timeout_s = -1", "body_timeout_s"),
        ("port = ", "cannot be read"),
        ("host = '0.0.0.0'", "keys are needed"),
        ("api_keys = {sales = 'short'}", "shorter than 16"),
    ):
        (tmp_path / "serve.toml").write_text(text, encoding="utf-8")
        command = ["serve", "--config", str(tmp_path / "serve.toml"), "--show-config"]
        done = CliRunner(env={"COLUMNS": "400"}).invoke(app, command)
        assert done.exit_code != 0
        assert told in done.output


@pytest.mark.parametrize("file", [FILE, FILE.replace("0.5", '"auto"')])
def test_a_server_gets_what_the_file_says(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_kv_llm import engine, server

    got: list[object] = []

    class StoppedError(Exception):
        pass

    def made(**options: object) -> None:
        got.append(options)
        raise StoppedError

    monkeypatch.setattr(engine, "FusedKVEngine", made)
    checked = server.ServerConfig

    def config(**options: object) -> server.ServerConfig:
        got.append(checked(**options))
        return got[-1]  # type: ignore[return-value]

    config.model_fields = checked.model_fields  # type: ignore[attr-defined]
    monkeypatch.setattr(server, "ServerConfig", config)
    (tmp_path / "serve.toml").write_text(file, encoding="utf-8")
    done = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "serve.toml")])
    assert isinstance(done.exception, StoppedError)
    options, engine_options = got
    assert isinstance(options, checked)
    assert isinstance(engine_options, dict)
    assert options.quotas["sales"].requests_per_minute == 60
    assert options.api_keys["sales"].get_secret_value() == "the-secret-key-of-the-sales"
    assert (options.port, options.body_timeout_s) == (9000, 7.5)
    assert engine_options["recompute_ratio"] == (0.5 if file == FILE else "auto")
    assert (engine_options["model"], engine_options["max_num_seqs"]) == ("smollm2-135m", 3)
