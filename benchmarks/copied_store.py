"""A store of KV that a benchmark may write to."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

__all__ = ["copied_store"]


def copied_store(folder: Path | None) -> Path:
    """Return a new folder with the same chunks as `folder`; without any if that is None."""
    new = Path(tempfile.mkdtemp(prefix="fused-kv-bench-")) / "kv"
    if folder is not None:
        shutil.copytree(folder, new)
    return new
