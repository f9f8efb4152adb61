"""Another process that keeps cores busy, and how long something takes beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy_process"]

_SPIN = """
import hashlib, threading
def work():
    data = b"x" * 10_000_000
    while True:
        hashlib.sha256(data).digest()
for _ in range({threads}):
    threading.Thread(target=work).start()
"""


@contextmanager
def busy_process(threads: int) -> Iterator[None]:
    """Have another process compute in so many threads; it lets go of its GIL while it does."""
    with subprocess.Popen([sys.executable, "-c", _SPIN.format(threads=threads)]) as process:
        try:
            yield
        finally:
            process.kill()
