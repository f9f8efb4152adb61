"""The version of a file, which no earlier or later file in the same place has."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["FileVersion", "file_version"]


class FileVersion(NamedTuple):
    """Identity of a file and of its content; what was read of a file holds as long as its version is the same.

    Parameters
    ----------
    inode : int
    size : int
        Bytes.
    modified_ns, changed_ns : int
        When the content was last modified, and when anything about the file last changed, in nanoseconds.
    """

    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def file_version(info: os.stat_result) -> FileVersion:
    """Return the version of a file by its status."""
    return FileVersion(info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
