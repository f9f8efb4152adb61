"""Cold reads on purpose: the system forgets what it has cached of a store's files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["drop_page_cache"]


def drop_page_cache(folder: Path) -> None:
    """Ask the system to forget the cached pages of every stored file below a folder, so that reads reach the disk.

    Where the system has no such call (macOS), nothing happens.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            # Pages that have not been written to the disk yet would stay.
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
