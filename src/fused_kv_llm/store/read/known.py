"""What this process knows of a chunk's file: its header, as long as the file is the same."""

from __future__ import annotations

import os
from typing import NamedTuple

from fused_kv_llm.store.format import ChunkHeader

__all__ = ["FileVersion", "KnownFile", "file_version"]

FileVersion = tuple[int, int, int, int]
"""Inode, size, and times of the last change of the content and of anything, in nanoseconds."""


def file_version(info: os.stat_result) -> FileVersion:
    """Return what tells a file from whatever has stood, or will stand, in its place."""
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


class KnownFile(NamedTuple):
    """A file whose header was verified.

    Parameters
    ----------
    version : tuple of int
        Of the file when its header was read.
    header : ChunkHeader
        The header.
    """

    version: FileVersion
    header: ChunkHeader
