"""The disk under a store: how much room it has, and why something could not be written."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fused_kv_llm.errors import StoreFullError, StoreUnavailableError

__all__ = ["free_bytes", "write_errors"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(root: Path) -> int:
    """Return the free bytes of a folder's disk.

    Raises
    ------
    StoreUnavailableError
        The system cannot tell.
    """
    try:
        return shutil.disk_usage(root).free
    except OSError as error:
        raise StoreUnavailableError(
            f"The free space of the disk of {root} cannot be found out: {error}. Check that it is still there."
        ) from error


@contextmanager
def write_errors(root: Path) -> Iterator[None]:
    """Turn system errors while writing into the store's errors.

    Raises
    ------
    StoreFullError
        The disk or the quota is full.
    StoreUnavailableError
        It could not be written for another reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(
                f"There is no room in {root} ({free_bytes(root) / 1e6:.1f} MB free): {error}. "
                "Free space, or set kv_dir to another disk."
            ) from error
        raise StoreUnavailableError(
            f"A chunk KV could not be written to {root}: {error}. Check the disk and the "
            "folder's permissions, or set kv_dir to another folder."
        ) from error
