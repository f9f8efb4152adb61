"""``fused-kv serve`` in a process of its own, with a corpus: started, watched, ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server_clients import json_of

__all__ = ["RSSWatch", "check_store", "ingest", "serving"]

_CODE = "import sys; from fused_kv_llm.cli import app; app(sys.argv[1:])"
_START_S = 180.0


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", _CODE, *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def serving(kv_dir: Path, log: Path, options: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server on a free port; give its process and its URL when it answers."""
    with log.open("w") as written:
        command = _command("serve", "--kv-dir", str(kv_dir), "--port", "0", *options)
        process = subprocess.Popen(command, stdout=written, stderr=written, env=_environment())
    try:
        deadline = time.monotonic() + _START_S
        while (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The server did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield process, found[0]
    finally:
        process.kill()
        process.wait()


def ingest(url: str, texts: dict[str, str]) -> list[str]:
    """Upload documents, wait for their jobs, and return the texts of their chunks."""
    made = [json_of(url, "/v1/documents", {"name": name, "text": text}) for name, text in texts.items()]
    for one in made:
        while (state := json_of(url, f"/v1/jobs/{one['job_id']}")["state"]) != "done":
            if state in ("failed", "cancelled", "interrupted"):
                raise RuntimeError(f"The ingestion of {one['name']} has {state}")
            time.sleep(0.1)
    found = [json_of(url, f"/v1/documents/{one['id']}")["chunks"] for one in made]
    return [chunk["text"] for chunks in found for chunk in chunks]


def check_store(kv_dir: Path, *options: str) -> tuple[int, str]:
    """Return the exit code of ``fused-kv store check``, 0 for a clean store, and what it says."""
    command = _command("store", "check", "--kv-dir", str(kv_dir), *options)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    return done.returncode, done.stdout + done.stderr


class RSSWatch:
    """Notes the resident bytes of a process every second."""

    def __init__(self, pid: int) -> None:
        self._path, self._over = Path(f"/proc/{pid}/statm"), threading.Event()
        self.nbytes: list[int] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Return the first and the last quarter's median, the highest, and the growth of the second half."""
        self._over.set()
        self._thread.join()
        quarter = max(1, len(self.nbytes) // 4)
        first, last = (sorted(part)[len(part) // 2] for part in (self.nbytes[:quarter], self.nbytes[-quarter:]))
        return {
            "rss_first_quarter_bytes": first,
            "rss_last_quarter_bytes": last,
            "rss_peak_bytes": max(self.nbytes),
            "rss_growth_bytes_per_minute": round(60 * _slope(self.nbytes[len(self.nbytes) // 2 :])),
        }

    def _run(self) -> None:
        while True:
            self.nbytes.append(int(self._path.read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))
            if self._over.wait(1.0):
                return


def _slope(values: Sequence[float]) -> float:
    """Return how much values grow from one to the next, by least squares."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((number - middle) ** 2 for number in range(len(values)))
    return sum((number - middle) * (value - mean) for number, value in enumerate(values)) / spread if spread else 0.0
