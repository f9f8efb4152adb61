"""A fingerprint of a model by the content of its files.

vLLM's own copy of the weights is packed for its kernels, so it cannot be compared with what other releases and other
processors make of the same files. The files can be.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash

from fused_kv_llm.errors import ModelNotFoundError
from fused_kv_llm.paths import cache_folder, write_atomically

__all__ = ["fingerprint_model_files", "model_path"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ABOUT_WEIGHTS = (".json", ".py")
# What they say decides token ids, or when an answer ends, and not the KV of tokens.
_OF_TEXTS = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "generation_config", "chat_template")
_BLOCK = 2**20


def fingerprint_model_files(path: Path) -> str:
    """Hash the weights of a model, and the files beside them that say how they are used.

    Parameters
    ----------
    path : Path
        The model's folder, or its only file.

    Returns
    -------
    str
        128-bit xxh3, hexadecimal. It does not depend on where the files are, nor on when they were written; it is
        remembered, in the user's cache folder, for files whose sizes and times have not changed.

    Raises
    ------
    ModelNotFoundError
        There are no weights.
    """
    files = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.is_file() and _matters(file))
    if not any(file.suffix in _WEIGHTS for file in files):
        raise ModelNotFoundError(
            f"There are no weights in {str(path)!r}, so KV that is computed with them cannot be told from other KV. "
            "Give vLLM the folder of a model, or a file."
        )
    resolved = [file.resolve() for file in files]
    stats = [(file.name, str(real), *_stat(real)) for file, real in zip(files, resolved, strict=True)]
    memo = cache_folder() / "fingerprints" / hashlib.sha256(json.dumps(["files", stats]).encode()).hexdigest()
    remembered = memo.read_text().strip() if memo.exists() else ""
    if len(remembered) != 32:
        remembered = _hash(resolved, [file.name for file in files])
        write_atomically(memo, remembered.encode())
    return remembered


def model_path(name: str, revision: str | None = None) -> Path:
    """Return where the files of a model are: a path, or an id on a hub whose files are on this machine.

    Raises
    ------
    ModelNotFoundError
        They are not.
    """
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"The files of the model {name!r} are not on this machine, so KV cannot be told from other models' KV. "
            "Give the folder of the model."
        ) from error


def _matters(file: Path) -> bool:
    return file.suffix in _WEIGHTS or (file.suffix in _ABOUT_WEIGHTS and not file.name.startswith(_OF_TEXTS))


def _stat(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _hash(files: list[Path], names: list[str]) -> str:
    digest = xxhash.xxh3_128()
    for file, name in zip(files, names, strict=True):
        digest.update(f"{name}|{file.stat().st_size}|".encode())
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK):
                digest.update(block)
    return str(digest.hexdigest())
