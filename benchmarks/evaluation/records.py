"""Records on disk: one line a question and method, appended as they come, so that a stopped run goes on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

__all__ = ["RecordFile", "Records", "read_by_settings", "read_records", "settings_digest"]

Records = dict[tuple[str, str], dict[str, Any]]


def settings_digest(**settings: Any) -> str:
    """Return a short digest of everything besides question and method that a record depends on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def read_by_settings(out: Path) -> dict[str, Records]:
    """Return the records of all parts of a run by the digest of their settings, then by question and method key.

    A line that was cut off by a crash is left out and measured again.
    """
    found: dict[str, Records] = {}
    for path in sorted(out.parent.glob(f"{out.stem}.records*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            found.setdefault(record["settings"], {})[record["question"], record["method"]] = record
    return found


def read_records(out: Path, digest: str) -> Records:
    """Return the records of these settings."""
    return read_by_settings(out).get(digest, {})


class RecordFile:
    """Appends the records of one process.

    Parameters
    ----------
    out : Path
        The result's path; the records lie beside it.
    digest : str
        Of the settings.
    shard : tuple of int
        ``(i, n)``: each part of a run writes a file of its own.
    """

    def __init__(self, out: Path, digest: str, shard: tuple[int, int]) -> None:
        part = "" if shard[1] == 1 else f".{shard[0]}of{shard[1]}"
        self.digest = digest
        self._out = out
        self._path = out.parent / f"{out.stem}.records{part}.jsonl"

    def read(self) -> Records:
        """Return the records of these settings, those of the other parts of the run among them."""
        return read_records(self._out, self.digest)

    def append(self, question: str, records: dict[str, dict[str, Any]]) -> None:
        """Write one question's records at once."""
        lines = [
            json.dumps({"settings": self.digest, "question": question, "method": method, **record})
            for method, record in records.items()
        ]
        # A line that a crash cut off must not swallow the next one.
        cut = self._path.exists() and self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a", encoding="utf-8") as handle:
            handle.write(("\n" if cut else "") + "\n".join(lines) + "\n")
