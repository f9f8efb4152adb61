"""The options, the package without vLLM, and the fingerprint of a model's files."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fused_kv_llm.errors import ConfigError, MissingExtraError, ModelNotFoundError
from fused_kv_vllm.model_files import fingerprint_model_files
from fused_kv_vllm.settings import ConnectorSettings


def test_the_options_of_the_store_are_handed_on(tmp_path: Path) -> None:
    settings = ConnectorSettings.of({"kv_dir": str(tmp_path / "kv"), "disk_bytes": "1GB", "span_tokens": 100})
    assert settings.span_blocks(16) == 7
    assert settings.span_blocks(128) == 1
    with settings.open_store() as store:
        assert store.kv_dir == tmp_path / "kv"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'needs "kv_dir"'),
        ({"kv_dir": ""}, "kv_dir=''"),
        ({"kv_dir": 3}, "kv_dir=3"),
        ({"kv_dir": "kv", "chunk_size": 256}, "unknown options: chunk_size"),
        ({"kv_dir": "kv", "span_tokens": 0}, "span_tokens=0"),
        ({"kv_dir": "kv", "span_tokens": True}, "span_tokens=True"),
        ({"kv_dir": "kv", "writes_waiting": "many"}, "writes_waiting='many'"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConnectorSettings.of(options)


def test_credentials_are_not_shown() -> None:
    settings = ConnectorSettings.of({"kv_dir": "kv", "remote": "s3://b", "remote_options": {"secret": "hunter2"}})
    assert "hunter2" not in repr(settings)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_connector_says_what_is_missing() -> None:
    import fused_kv_vllm

    with pytest.raises(MissingExtraError, match="pip install vllm"):
        _ = fused_kv_vllm.FusedKVConnector
    with pytest.raises(AttributeError):
        _ = fused_kv_vllm.nothing


def test_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, fused_kv_vllm, fused_kv_vllm.scheduling, fused_kv_vllm.worker, fused_kv_vllm.settings\n"
        "print([name for name in ('vllm', 'transformers', 'accelerate', 'faiss') if name in sys.modules])"
    )
    path = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "[]"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_model_is_told_by_its_content(model: Path, tmp_path: Path) -> None:
    first = fingerprint_model_files(model)
    assert len(first) == 32
    moved = model.rename(tmp_path / "elsewhere")
    os.utime(moved / "model.safetensors", (1, 1))
    assert fingerprint_model_files(moved) == first


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_other_content_is_another_model(model: Path, name: str) -> None:
    first = fingerprint_model_files(model)
    data = bytearray((model / name).read_bytes())
    data[3] ^= 1
    (model / name).write_bytes(data)
    os.utime(model / name, (2, 2))
    assert fingerprint_model_files(model) != first


def test_the_tokenizer_does_not_count(model: Path) -> None:
    first = fingerprint_model_files(model)
    (model / "tokenizer.json").write_text('{"other": 1}')
    assert fingerprint_model_files(model) == first


def test_a_fingerprint_is_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint_model_files(model)
    monkeypatch.setattr("fused_kv_vllm.model_files._hash", lambda *_: pytest.fail("hashed again"))
    assert fingerprint_model_files(model) == first


def test_a_single_file_is_a_model(model: Path) -> None:
    assert len(fingerprint_model_files(model / "model.safetensors")) == 32


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no weights"):
        fingerprint_model_files(model)
