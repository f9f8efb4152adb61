"""From an upload to chunks, in a process with limits of memory and time: its file may have been made to do harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fused_kv_llm.demo import SUFFIXES, split_text
from fused_kv_llm.errors import CorpusError

__all__ = ["UPLOAD_SUFFIXES", "ReadingLimits", "read_upload"]

UPLOAD_SUFFIXES = SUFFIXES
_POLL_S = 0.05
# So much plain text is split at once; a process would take a second or two to begin.
_SMALL_CHARS = 50_000
_MODULE = "fused_kv_llm.demo.limited_reading"


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """What reading one document may take.

    Parameters
    ----------
    chunk_chars : int
        Longest chunk, in characters.
    max_pages : int
        Most pages of a PDF.
    max_chars : int
        Most characters of text.
    memory_bytes : int
        Of the process.
    cpu_s, timeout_s : int, float
        Seconds that it computes, and that it is waited for.
    """

    chunk_chars: int = 1000
    max_pages: int = 2000
    max_chars: int = 5_000_000
    memory_bytes: int = 2**30
    cpu_s: int = 60
    timeout_s: float = 180.0


def read_upload(content: bytes, suffix: str, limits: ReadingLimits, check: Callable[[], None]) -> list[str]:
    """Return the chunks of an upload.

    Parameters
    ----------
    content : bytes
    suffix : str
        One of :data:`UPLOAD_SUFFIXES`.
    limits : ReadingLimits
    check : callable
        Called again and again while the process is waited for; it may raise, which ends the process.

    Returns
    -------
    list of str
        Distinct.

    Raises
    ------
    CorpusError
        If the upload has no text, or cannot be read within the limits.
    """
    if suffix in (".txt", ".md") and len(content) <= _SMALL_CHARS:
        texts = list(dict.fromkeys(split_text(_decoded(content), limits.chunk_chars)))
    else:
        texts = _read_apart(content, suffix, limits, check)
    if not texts:
        raise CorpusError("There is no text in the document")
    return texts


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"The document is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _read_apart(content: bytes, suffix: str, limits: ReadingLimits, check: Callable[[], None]) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="fused-kv-upload-") as folder, tempfile.TemporaryFile() as written:
        path = Path(folder) / f"upload{suffix}"
        path.write_bytes(content)
        code = _run([str(path), json.dumps(asdict(limits))], written, limits, check)
        written.seek(0)
        answer = _answer(written.read()) if code == 0 else {}
    if "error" in answer:
        raise CorpusError(answer["error"])
    if "texts" not in answer:
        raise CorpusError(
            f"The document cannot be read within {limits.cpu_s} s and {limits.memory_bytes // 2**20} MiB of memory"
        )
    return [str(text) for text in answer["texts"]]


def _run(arguments: list[str], written: Any, limits: ReadingLimits, check: Callable[[], None]) -> int:
    # Keys and other secrets in the environment are none of its business.
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ.get("PATH", "")}
    command = [sys.executable, "-P", "-m", _MODULE, *arguments]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=written, stderr=null, env=environment)
    try:
        until_s = time.monotonic() + limits.timeout_s
        while time.monotonic() < until_s:
            check()
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
        return -1
    finally:
        process.kill()
        process.wait()


def _answer(written: bytes) -> dict[str, Any]:
    try:
        found = json.loads(written)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
