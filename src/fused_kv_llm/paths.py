"""Where derived files live, and how they are written so that two processes do no harm."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "write_atomically"]


def cache_folder() -> Path:
    """Return the user's cache folder of this project; ``FUSED_KV_CACHE`` overrides it."""
    if os.environ.get("FUSED_KV_CACHE"):
        return Path(os.environ["FUSED_KV_CACHE"])
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("fused_kv_llm"))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader sees all of it or none.

    Parameters
    ----------
    path : Path
        Its folder is created if need be.
    data : bytes
        The content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
