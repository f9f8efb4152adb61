"""Durable writes, and locks on open files."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

__all__ = ["lock_file", "write_durably"]


def write_durably(folder: int, name: str, parts: Sequence[memoryview]) -> None:
    """Write a new private file in an open folder, and return when its bytes are on the disk."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        for part in parts:
            rest = part
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_file(fd: int, operation: int) -> bool:
    """Lock an open file without waiting; False if another lock is in the way."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some file systems and all pipes have no locks. Eviction then relies on open files staying readable.
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF):
            raise
    return True
